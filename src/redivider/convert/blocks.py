"""Where the blocks of a network are."""

from collections.abc import Iterator

from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(model: nn.Module, name: str | None) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of a network's blocks, and the blocks.

    Args:
        model: The network.
        name: Name of the list in the network; None to take the only one that there is.
    """
    if name is not None:
        try:
            members = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"blocks={name!r}: the model has no module of that name") from None
        if not isinstance(members, LISTS) or not len(members):
            raise ValueError(
                f"blocks={name!r} must name a list of blocks, a ModuleList or Sequential, got "
                f"{type(members).__name__}"
            )
        return name, list(members)
    candidates = dict(_candidates(model))
    if len(candidates) == 1:
        name, blocks = next(iter(candidates.items()))
        return name, list(blocks.children())
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one kind; name it: blocks=..."
        )
    names = ", ".join(map(repr, candidates))
    raise ValueError(f"{type(model).__name__} has several lists of blocks, {names}; name one")


def _candidates(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Find lists of at least two blocks of one class, but not those inside of such blocks."""
    for name, child in model.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if _is_list_of_blocks(child):
            yield full, child
        else:
            yield from _candidates(child, full)


def _is_list_of_blocks(module: nn.Module) -> bool:
    members = list(module.children()) if isinstance(module, LISTS) else []
    kinds = {type(member) for member in members}
    # Blocks have layers of their own; a list of plain layers is no list of blocks.
    return len(members) > 1 and len(kinds) == 1 and any(True for _ in members[0].children())
