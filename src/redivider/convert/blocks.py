"""Search for the blocks of a network."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(model: nn.Module, name: str | None) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of a network's blocks, and the blocks.

    Args:
        model: The network.
        name: Name of the list in the network; None to take the only one that there is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, got {type(model).__name__}")
    if name is not None:
        if not isinstance(name, str) or not name:
            kind = repr(name) if isinstance(name, str) else type(name).__name__
            raise ValueError(f"blocks must be a name, such as 'encoder.layers', got {kind}")
        try:
            members = model.get_submodule(name)
        except AttributeError:
            try:
                kind = type(attrgetter(name)(model)).__name__
            except AttributeError:
                raise ValueError(f"blocks={name!r}: the model has no module of that name") from None
            raise _not_a_list(name, kind) from None
        if not isinstance(members, LISTS) or not len(members):
            raise _not_a_list(name, type(members).__name__)
        return name, list(members)
    candidates = dict(_candidates(model))
    if len(candidates) == 1:
        name, blocks = next(iter(candidates.items()))
        return name, list(blocks)
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential with two or more blocks of "
            "one kind; name a list of several kinds, blocks=...; use checkpointing for one block"
        )
    names = ", ".join(map(repr, candidates))
    raise ValueError(f"{type(model).__name__} has several lists of blocks, {names}; name one")


def _not_a_list(name: str, kind: str) -> ValueError:
    return ValueError(
        f"blocks={name!r} must name a list of blocks, a ModuleList or Sequential, got {kind}"
    )


def _candidates(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Find lists of at least two blocks of one class, but not those inside of such blocks."""
    for name, child in model.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if _is_list_of_blocks(child):
            yield full, child
        else:
            yield from _candidates(child, full)


def _is_list_of_blocks(module: nn.Module) -> bool:
    members = list(module) if isinstance(module, LISTS) else []  # duplicates as well
    kinds = {type(member) for member in members}
    # Blocks have layers of their own; a list of plain layers is no list of blocks.
    return len(members) > 1 and len(kinds) == 1 and any(True for _ in members[0].children())
