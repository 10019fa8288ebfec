"""Times and bytes of the stages of a pipeline, measured here to simulate it elsewhere."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from redivider.backward.stopwatch import Stopwatch
from redivider.chain import Chain, taken
from redivider.checks.memory import format_bytes, measure_memory
from redivider.checks.restore import restored
from redivider.pipeline.diagnostics.memory import count_bytes, holdings, sum_of_means
from redivider.pipeline.partition import units_of
from redivider.pipeline.pipeline import Pipeline
from redivider.pipeline.schedule import Schedule
from redivider.tree import map_tensors, tensors_of


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of every stage for one micro-batch, made by `measure_stages`."""

    cut: list[int]
    """Units of the stages."""
    forward: list[float]
    """Seconds of a forward."""
    backward: list[float]
    """Seconds of a backward of the method, with what it computes again."""
    stored: list[float]
    """Seconds of a backward by plain autograd, with everything stored."""
    kept: list[int]
    """Bytes that the method keeps until the backward; 0 in the last stage."""
    graph: list[int]
    """Bytes that plain autograd keeps until the backward."""
    up: list[int]
    """Bytes of a message from the stage below."""
    down: list[int]
    """Bytes of a message from the stage above."""
    weights: list[int]
    """Bytes of the parameters."""

    def held(self, schedule: Schedule) -> list[int]:
        """Return the bytes of activations and messages that stages hold between two ticks."""
        return [
            schedule.num_kept(stage) * self.kept[stage]
            + schedule.num_waiting("up", stage) * self.up[stage]
            + schedule.num_waiting("down", stage) * self.down[stage]
            for stage in range(len(self.cut))
        ]

    def __str__(self) -> str:
        """Format a table with a row per stage."""
        rows = [["stage", "units", "forward", "backward", "stored", "kept", "graph", "weights"]]
        for j, size in enumerate(self.cut):
            seconds = (times[j] for times in (self.forward, self.backward, self.stored))
            numbers = (values[j] for values in (self.kept, self.graph, self.weights))
            rows.append([str(j), str(size), *(f"{1000 * second:.2f} ms" for second in seconds)])
            rows[-1] += map(format_bytes, numbers)
        return "\n".join("".join(f"{cell:>12}" for cell in row) for row in rows)


def measure_stages(
    model: Any,
    stages: int | Sequence[int],
    x: Any,
    *,
    method: str = "petra",
    capture: bool = True,
    repeats: int = 5,
    **side: Any,
) -> StageCosts:
    """Measure the stages of a pipeline on this device, to feed `rd.simulate`.

        costs = rd.measure_stages(model, 8, x)
        rd.simulate(stages=8, forward=costs.forward, backward=costs.backward, hop=0.001)

    Args:
        model: As for `rd.Pipeline`. It stays as it was.
        stages: Number of stages, balanced by work on x, or a list of their sizes.
        x: A micro-batch.
        method: Method of `rd.Pipeline`.
        capture: Whether to leave out the time of the host on a GPU, as in captured ticks.
        repeats: Ticks and runs to take medians of, at least.
        side: Keywords of the units.
    """
    pipe = Pipeline(
        deepcopy(list(units_of(model).values())),
        stages=stages,
        loss=sum_of_means,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0),
        method=method,
        capture=False,
        example=x,
    )
    how = {"on_gpu": any(tensor.is_cuda for tensor in tensors_of(x)), "ahead": capture}
    watches: dict[str, list[Stopwatch]] = {"run_forward": [], "run_backward": []}
    for name, own in watches.items():
        for stage in pipe.stages:
            own.append(Stopwatch(getattr(stage, name), **how))
            setattr(stage, name, own[-1])
    for _ in range(pipe.schedule.num_in_flight + repeats):
        # Copies, because a tensor in several micro-batches would count once.
        own_x, own_side = map_tensors(lambda tensor: tensor.detach().clone(), (x, side))
        pipe.step(own_x, **own_side)
    num_kept = [max(pipe.schedule.num_kept(j), 1) for j in range(len(pipe.cut))]
    held = [holding.activations for holding in holdings(pipe)]
    stored, graph = _measure_plain(pipe, x, side, repeats, how)
    flight = pipe.in_flight
    return StageCosts(
        cut=pipe.cut,
        forward=[median(watch.seconds[-repeats:]) for watch in watches["run_forward"]],
        backward=[median(watch.seconds[-repeats:]) for watch in watches["run_backward"]],
        stored=stored,
        kept=[total // num for total, num in zip(held, num_kept, strict=True)],
        graph=graph,
        up=[_message_bytes(inbox) for inbox in flight.up],
        down=[_message_bytes(inbox) for inbox in flight.down],
        weights=[sum(p.nbytes for p in stage.module.parameters()) for stage in pipe.stages],
    )


def _measure_plain(
    pipe: Pipeline, x: Any, side: dict[str, Any], repeats: int, how: dict[str, bool]
) -> tuple[list[float], list[int]]:
    """Return the seconds of a plain backward and the bytes of its graph, of every stage."""
    stored, graph = [], []
    for stage in pipe.stages:
        chain = Chain([unit.module for unit in stage.units], backward="store")
        own = taken(chain, side)
        with restored(chain):
            x = map_tensors(_as_input, x)
            graph.append(measure_memory(chain, x, **own).held)
            watch = Stopwatch(torch.autograd.backward, **how)
            for _ in range(repeats):
                y = chain(x, **own)
                outputs = [tensor for tensor in tensors_of(y) if tensor.requires_grad]
                grads = [torch.ones_like(output) for output in outputs]
                if outputs:
                    watch(outputs, grads)
            stored.append(median(watch.seconds or [0.0]))
            with torch.no_grad():
                x = chain(x, **own)
    return stored, graph


def _as_input(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _message_bytes(inbox: dict[int, Any]) -> int:
    """Return the bytes of a message in an inbox; 0 if none travels there."""
    message = next(iter(inbox.values()), None)
    return 0 if message is None else count_bytes((message.flow.value, message.grads), set())
