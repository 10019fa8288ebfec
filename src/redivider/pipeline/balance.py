"""Balanced stages of a pipeline, within a limit on the memory of every device.

A stage has its weights with their gradients and the state of the optimizer; for every micro-batch
in flight what its units keep, and the messages on their way to it; and what a unit needs while it
runs. All of that depends on the place of the stage: lower ones have more micro-batches in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate as running_sums
from math import ceil, inf
from typing import Any

import torch
from torch import nn

from redivider.backward.strategy import Keep
from redivider.chain import Chain, name_unit, taken
from redivider.checks.memory import format_bytes, measure_memory
from redivider.checks.restore import restored
from redivider.checks.size import parse_bytes
from redivider.coupling import Coupling
from redivider.errors import naming
from redivider.pipeline.diagnostics.memory import count_bytes
from redivider.pipeline.methods import Method, resolve_method
from redivider.pipeline.partition import as_leaves, count_costs, cut_by, units_of
from redivider.pipeline.schedule import Schedule, resolve_latency, verify_latency


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of a unit, for one micro-batch."""

    couples: bool
    """Whether it is a coupling."""
    trained: int
    """Bytes of the parameters that get a gradient."""
    fixed: int
    """Bytes of other parameters and of buffers."""
    input: int
    argument: int
    """Bytes of what a backward needs of the input: one stream of a coupling, else all of it."""
    output: int
    graph: int
    """Bytes that plain autograd keeps."""
    peak: int
    """Largest number of bytes in a forward and backward by plain autograd."""

    def scaled(self, factor: float) -> "UnitBytes":
        """Return the bytes for a micro-batch so many times as large."""
        names = ("input", "argument", "output", "graph", "peak")
        return replace(self, **{name: ceil(getattr(self, name) * factor) for name in names})


def balance(
    model: Any,
    stages: int,
    *,
    by: str = "work",
    example: Any = None,
    memory: int | str | None = None,
    method: str = "petra",
    latency: float | Sequence[float] = 1,
    accumulate: int = 1,
    weight_copies: int = 4,
    **side: Any,
) -> list[int]:
    """Return the sizes of `stages` stages, balanced by "units", "work" or "time".

    Use it to keep one cut for several runs:

        sizes = rd.balance(model, 8, by="time", example=images, memory="6GiB")
        pipe = rd.Pipeline(model, stages=sizes, ...)

    Args:
        model: As for `rd.Pipeline`.
        stages: Number of stages.
        by: "units" for their number, "work" for the FLOPs of the forward, "time" for seconds of
            forward and backward.
        example: A micro-batch, for "work" and "time", and for a limit on the memory.
        memory: Bytes that every stage may take, also as "6GiB" or "500 MB". The cut is the most
            even one of those that fit.
        method: Method of the pipeline. It and the next two count only for the memory.
        latency: Latency of the pipeline.
        accumulate: Backward passes per update, for methods that keep old weights.
        weight_copies: Trained weights, their gradients, and the state of the optimizer, in copies
            of the weights: 4 for Adam, 3 with momentum, 2 for plain SGD.
        **side: Keywords of the units.

    Raises:
        ValueError: If no cut fits; it says how much is needed, and by which unit.
    """
    costs = count_costs(model, by, example, **side)
    sums = [0.0, *running_sums(costs)]
    if memory is None:
        return cut_by(lambda _, start, end: sums[end] - sums[start], len(costs), stages)
    if example is None:
        raise ValueError("memory needs an example: a micro-batch like those to be trained on")
    verify_latency(latency)
    limit, units = parse_bytes(memory), units_of(model)
    cut_by(lambda *_: 0.0, len(units), stages)  # refuses a wrong number of stages before measuring
    sizes = StageSizes(
        measure_units(units, example, side),
        resolve_method(method),
        Schedule(stages, resolve_latency(latency, stages)),
        accumulate,
        weight_copies,
    )

    def load(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] if sizes(stage, start, end) <= limit else inf

    cut = cut_by(load, len(units), stages)
    ends = list(running_sums(cut))
    if all(sizes(j, end - cut[j], end) <= limit for j, end in enumerate(ends)):
        return cut
    least = cut_by(sizes, len(units), stages)
    ends = list(running_sums(least))
    needs = [sizes(j, end - least[j], end) for j, end in enumerate(ends)]
    stage = needs.index(max(needs))
    own = range(ends[stage] - least[stage], ends[stage])
    largest = max(own, key=lambda i: sizes(stage, i, i + 1))
    name = name_unit(largest, list(units.values())[largest], list(units)[largest])
    raise ValueError(
        f"no cut into {stages} stages fits into {limit:,} bytes each: the smallest limit is "
        f"{max(needs):,} bytes ({format_bytes(max(needs))}), which stage {stage} needs, most of it "
        f"for {name}; use more stages or smaller micro-batches"
    )


class StageSizes:
    """Bytes of a stage of some units, as a function of its place.

    Args:
        units: Bytes of the units.
        method: Method of the pipeline.
        schedule: Schedule of the pipeline.
        accumulate: Backward passes per update.
        weight_copies: Trained weights, gradients and optimizer state, in copies of the weights.
    """

    def __init__(
        self,
        units: Sequence[UnitBytes],
        method: Method,
        schedule: Schedule,
        accumulate: int,
        weight_copies: int,
    ) -> None:
        self.units, self.method, self.schedule = units, method, schedule
        self.accumulate = accumulate
        kept = [_kept(u, method.coupling if u.couples else method.junction) for u in units]
        self._kept = _sums(kept)
        # In the last stage junctions have a graph until the loss is there.
        self._last = _sums([k if u.couples else u.graph for u, k in zip(units, kept, strict=True)])
        self._weights = _sums([weight_copies * u.trained + u.fixed for u in units])
        self._old = _sums([u.trained for u in units])
        self._peaks = [
            list(running_sums((u.peak for u in units[start:]), max)) for start in range(len(units))
        ]

    def __call__(self, stage: int, start: int, end: int) -> int:
        """Return the bytes of units start, ..., end - 1 as this stage."""
        size = self._weights[end] - self._weights[start]
        if self.method.weights == "stashed":
            # A kept graph has a copy of its weights also before they change.
            num_old = ceil(self.schedule.delay(stage) / self.accumulate)
            num_old += self.method.coupling == "graph"
            size += num_old * (self._old[end] - self._old[start])
        return size + self.in_flight(stage, start, end) + self._running(stage, start, end)

    def in_flight(self, stage: int, start: int, end: int) -> int:
        """Return the bytes of activations and messages between two ticks."""
        # With the gradients come the streams from which a coupling rebuilds its input.
        down = 1 + (self.units[end - 1].couples and self.method.coupling == "nothing")
        return (
            self.schedule.num_kept(stage) * self._keep(start, end)
            + self.schedule.num_waiting("up", stage) * self.units[start].input
            + self.schedule.num_waiting("down", stage) * down * self.units[end - 1].output
        )

    def synchronous(self, start: int, end: int, num_held: float, *, recompute: bool) -> float:
        """Return the bytes of units as a stage that stores, and never updates in between.

        Args:
            start: The first unit.
            end: The unit above the last.
            num_held: Micro-batches between forward and backward, at most.
            recompute: Whether only inputs of the stage are kept.
        """
        size = self._weights[end] - self._weights[start]
        size += max(0, *(unit.peak - unit.graph for unit in self.units[start:end]))
        keep = self._keep(start, end)
        return size + (num_held * self.units[start].input + keep if recompute else num_held * keep)

    def _keep(self, start: int, end: int) -> int:
        """Return the bytes that units keep for a micro-batch."""
        kept = self._kept[end] - self._kept[start]
        # A graph has the output of its unit, which the next one uses, and not its input.
        return kept + self.units[start].input if self.method.junction == "graph" else kept

    def _running(self, stage: int, start: int, end: int) -> int:
        """Return the bytes that a forward or backward needs besides."""
        peak = self._peaks[start][end - 1 - start]
        if stage == self.schedule.num_stages - 1:
            return peak + self._last[end] - self._last[start]
        if self.method.junction == "graph":  # a new graph is there before an old one goes
            return peak + self._keep(start, end)
        return peak


def _kept(unit: UnitBytes, keep: Keep) -> int:
    return {"nothing": 0, "input": unit.argument, "graph": unit.graph}[keep]


def measure_units(units: dict[str, nn.Module], x: Any, side: dict[str, Any]) -> list[UnitBytes]:
    """Measure the bytes of every unit on a micro-batch."""
    measured = []
    with restored(Chain(units.values())):
        for index, (name, unit) in enumerate(units.items()):
            with naming(name_unit(index, unit, name)):
                own = taken(unit, side)
                x = as_leaves(x)
                memory = measure_memory(Chain([unit], backward="store"), x, **own)
                with torch.no_grad():
                    y = unit(x, **own)
            tensors = [*unit.parameters(), *unit.buffers()]
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            measured.append(
                UnitBytes(
                    couples=isinstance(unit, Coupling),
                    trained=count_bytes(trained, set()),
                    fixed=count_bytes(tensors, set()) - count_bytes(trained, set()),
                    input=count_bytes(x, set()),
                    argument=count_bytes(x[0] if isinstance(unit, Coupling) else x, set()),
                    output=count_bytes(y, set()),
                    graph=memory.held,
                    peak=memory.peak_without_gradients,
                )
            )
            x = y
    return measured


def _sums(numbers: Sequence[int]) -> list[int]:
    return [0, *running_sums(numbers)]
