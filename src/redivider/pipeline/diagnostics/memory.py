"""Memory that the stages of a pipeline hold between two ticks, counted by storage."""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redivider.checks.memory import format_bytes
from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.stage import Stage
from redivider.tree import map_tensors, storages_of, tensors_of

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

    @property
    def total(self) -> int:
        """All of these bytes."""
        return self.activations + self.messages + self.weights


@dataclass(frozen=True)
class StagesMemory:
    """Bytes that the stages of a full pipeline hold between two ticks, at most."""

    stages: list[Holding]

    @property
    def held(self) -> int:
        """Bytes of all stages together."""
        return sum(holding.total for holding in self.stages)

    def __str__(self) -> str:
        """Format a table with a row per stage."""
        kinds = ("activations", "messages", "weights", "total")
        table = {str(own.stage): [getattr(own, kind) for kind in kinds] for own in self.stages}
        table["all"] = [sum(column) for column in zip(*table.values(), strict=True)]
        rows = [["stage", "activations", "messages", "old weights", "together"]]
        rows += [[name, *map(format_bytes, numbers)] for name, numbers in table.items()]
        return "\n".join(
            f"{row[0]:>5}" + "".join(f"{cell:>15}" for cell in row[1:]) for row in rows
        )


def measure_holdings(pipe: "Pipeline", x: Any, side: dict[str, Any]) -> StagesMemory:
    """Fill a copy of a pipeline with inputs like x, and count what its stages hold at most.

    The last stage runs the loss and its gradient in one action and keeps nothing of it, so the sum
    of the outputs takes the place of the loss.
    """
    if pipe.is_spread:
        raise ValueError(
            "the stages are in several processes; measure rd.Pipeline(...) of the same model in "
            f"one process, with stages={pipe.cut}"
        )
    trial = type(pipe)(
        deepcopy([unit.module for unit in pipe._units.values()]),
        stages=pipe.cut,
        loss=sum_of_means,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
        method=pipe.method.name,
        accumulate=pipe.accumulate,
        latency=pipe.latency,
        arithmetic=deepcopy(pipe.arithmetic),
        message_dtype=pipe.packing.dtype,
        seed=pipe.seed,
        capture=False,
    )
    seen = []
    # Old weights are held from the first update of a stage on, which comes when the pipeline is
    # full; their number depends on the place of the tick between two updates.
    for _ in range(2 * (pipe.schedule.num_in_flight + pipe.accumulate)):
        # Copies, because a tensor in several micro-batches would count once.
        own_x, own_side = map_tensors(lambda tensor: tensor.detach().clone(), (x, side))
        trial.step(own_x, **own_side)
        seen.append(holdings(trial))
    return StagesMemory(
        [
            Holding(
                by_tick[0].stage,
                max(holding.activations for holding in by_tick),
                max(holding.messages for holding in by_tick),
                max(holding.weights for holding in by_tick),
            )
            for by_tick in zip(*seen, strict=True)
        ]
    )


def sum_of_means(output: Any, target: Any) -> Tensor:
    """Return a number with a gradient for all of the output; averages, so that it is finite."""
    parts = [tensor.real for tensor in tensors_of(output) if tensor.requires_grad]
    return torch.stack([part.mean(dtype=torch.float64) for part in parts]).sum()


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
    count_bytes([*stage.module.parameters()], known)  # what shares memory with weights is free
    copies = count_bytes([u.weights.stash.copies for u in stage.units if u.weights.stash], known)
    kept = [entry for unit in stage.units for entry in unit.kept.values()]
    graphs = [tensor for entry in kept if entry.run for tensor in _saved(entry.run.output)]
    activations = count_bytes([[entry.value for entry in kept], graphs], known)
    messages = [message for inbox in inboxes for message in inbox.values()]
    waiting = [(message.flow.value, message.grads) for message in messages]
    return Holding(stage.index, activations, count_bytes(waiting, known), copies)


def count_bytes(tree: Any, known: set[int]) -> int:
    """Return the bytes of the storages in a tree that are not known yet, and note them."""
    total = 0
    for storage in storages_of(tree):
        key = storage.data_ptr() or storage._cdata  # on the meta device no memory has an address
        if key not in known:
            known.add(key)
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
