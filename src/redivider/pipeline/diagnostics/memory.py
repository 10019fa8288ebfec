"""What the stages of a pipeline hold between two ticks, counted by storage."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from redivider.pipeline.stages.stage import Stage


@dataclass(frozen=True)
class Holding:
    """Bytes of one stage."""

    stage: int
    activations: int
    """Kept inputs and graphs."""
    messages: int
    """On their way to it; some may be kept elsewhere as well."""
    weights: int
    """Copies of its weights."""


def holdings(pipe: Any) -> list[Holding]:
    """Count what each stage of a pipeline holds.

    A captured tick holds as much in its graphs, and more: it is brought back from there first.
    """
    pipe._leave_graphs()
    return [_held(each, pipe._up[each.index], pipe._down[each.index]) for each in pipe.stages]


def _held(stage: Stage, *inboxes: dict[int, Any]) -> Holding:
    known: set[int] = set()
    _size([*stage.module.parameters()], known)
    copies = _size([u.weights.stash.copies for u in stage.units if u.weights.stash], known)
    kept = [each for unit in stage.units for each in unit.kept.values()]
    graphs = [t for each in kept if each.run for t in _saved(each.run.output)]
    activations = _size([[each.value for each in kept], graphs], known)
    waiting = [(each.flow.value, each.grads) for inbox in inboxes for each in inbox.values()]
    return Holding(stage.index, activations, _size(waiting, known), copies)


def _size(tree: Any, known: set[int]) -> int:
    """Bytes of all storages in a tree that are not known yet."""
    total = 0
    for each in tree_leaves(tree):
        if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
            known.add(each.untyped_storage().data_ptr())
            total += each.untyped_storage().nbytes()
    return total


def _saved(output: Any) -> list[Tensor]:
    """What autograd has saved in the graph of an output."""
    saved: list[Tensor] = []
    seen: set[Any] = set()
    queue: list[Any] = [each.grad_fn for each in tree_leaves(output)]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                saved += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        queue += [after for after, _ in node.next_functions]
    return saved
