"""Memory that the stages of a pipeline hold between two ticks, counted by storage."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.stage import Stage
from redivider.tree import tensors_of

if TYPE_CHECKING:
    from redivider.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Holding:
    """Bytes that one stage holds."""

    stage: int
    activations: int
    """Bytes of kept inputs and graphs."""
    messages: int
    """Bytes of messages in flight to the stage; another stage may keep the same tensors."""
    weights: int
    """Bytes of old copies of its weights."""


def holdings(pipe: "Pipeline") -> list[Holding]:
    """Count the bytes that each stage of a pipeline holds.

    Captured ticks hold as much in the memory of their graphs, and more. The pipeline leaves the
    graphs first, so that the count is that of eager ticks.
    """
    pipe._leave_graphs()
    return [
        _count(stage, pipe.in_flight.up[stage.index], pipe.in_flight.down[stage.index])
        for stage in pipe.stages
    ]


def _count(stage: Stage, *inboxes: dict[int, Message]) -> Holding:
    known: set[int] = set()
    _num_bytes([*stage.module.parameters()], known)  # what shares memory with weights is free
    copies = _num_bytes([u.weights.stash.copies for u in stage.units if u.weights.stash], known)
    kept = [entry for unit in stage.units for entry in unit.kept.values()]
    graphs = [tensor for entry in kept if entry.run for tensor in _saved(entry.run.output)]
    activations = _num_bytes([[entry.value for entry in kept], graphs], known)
    messages = [message for inbox in inboxes for message in inbox.values()]
    waiting = [(message.flow.value, message.grads) for message in messages]
    return Holding(stage.index, activations, _num_bytes(waiting, known), copies)


def _num_bytes(tree: Any, known: set[int]) -> int:
    """Return the bytes of the storages in a tree that are not known yet, and note them."""
    total = 0
    for tensor in tensors_of(tree):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _saved(output: Any) -> list[Tensor]:
    """Return the tensors that autograd has saved in the graph of an output."""
    saved: list[Tensor] = []
    seen: set[Any] = set()
    queue: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                saved += tensors_of(value)
        queue += [parent for parent, _ in node.next_functions]
    return saved
