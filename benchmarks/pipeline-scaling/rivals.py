"""torch.distributed.pipelining on the same units: GPipe and 1F1B, recomputed or stored."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from setting import Setting, loss, sgd
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from redivider.checks.memory import Live

SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Units(nn.Module):
    """Units of a stage as one module, with plain backprop or with recomputation of each unit."""

    def __init__(self, units: list[nn.Module], *, recompute: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self._recompute = recompute

    def forward(self, *value: Any) -> Any:
        """Map an image or two streams to two streams or logits."""
        flow: Any = value if len(value) == 2 else value[0]
        for unit in self.units:
            if self._recompute:
                flow = checkpoint(unit, flow, use_reentrant=False, preserve_rng_state=False)
            else:
                flow = unit(flow)
        return flow


class Rival:
    """A schedule of torch over the processes; a step is a mini-batch and an update.

    Args:
        setting: Model and sizes of the runs.
        cut: The units of each stage.
        schedule: "GPipe" or "1F1B".
        microbatches: Micro-batches of a step.
        recompute: Whether to recompute units in the backward instead of keeping their graphs.
        warm: Whether to run two steps now.
    """

    def __init__(
        self,
        setting: Setting,
        cut: list[int],
        schedule: str,
        *,
        microbatches: int,
        recompute: bool,
        warm: bool = True,
    ) -> None:
        rank = dist.get_rank()
        units = list(setting.model().units())
        first = sum(cut[:rank])
        self.module = Units(units[first : first + cut[rank]], recompute=recompute)
        self.optimizer = sgd(self.module)
        self._setting, self._num = setting, microbatches
        self._stage = PipelineStage(self.module, rank, len(cut), torch.device("cpu"))
        self._schedule = SCHEDULES[schedule](self._stage, microbatches, loss_fn=loss)
        images, targets = setting.examples(microbatches)
        self._args: tuple[Tensor, ...] = (images,) if rank == 0 else ()
        self._keywords = {"target": targets} if rank == len(cut) - 1 else {}
        if warm:
            self.run(2 * microbatches)

    def run(self, num: int) -> float:
        """Train `num` micro-batches in whole steps; return the seconds."""
        start = time.perf_counter()
        for _ in range(num // self._num):
            self._schedule.step(*self._args, **self._keywords)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - start

    def timed(self) -> float:
        """Return the seconds of a run, after one step that aligns all processes."""
        self.run(self._num)
        return self.run(self._setting.num_microbatches)

    def peak(self) -> int:
        """Return the peak bytes of a step; call it before the first one."""
        with Live() as live:
            self.run(self._num)
            live.peak = live.bytes
            self.run(2 * self._num)
            peak: int = live.peak
        return peak

    @contextmanager
    def spans(self) -> Iterator[list[tuple[str, float, float]]]:
        """Record forwards and backwards inside the context."""
        spans: list[tuple[str, float, float]] = []
        names = {"F": "forward_one_chunk", "B": "backward_one_chunk"}
        before = {name: getattr(self._stage, name) for name in names.values()}
        for kind, name in names.items():
            setattr(self._stage, name, _watched(before[name], kind, spans))
        try:
            yield spans
        finally:
            for name, function in before.items():
                setattr(self._stage, name, function)

    @property
    def num_parameter_bytes(self) -> int:
        """Bytes of the parameters of this process's stage."""
        return sum(param.nbytes for param in self.module.parameters())


def _watched(
    function: Callable[..., Any], kind: str, spans: list[tuple[str, float, float]]
) -> Callable[..., Any]:
    def watched(*args: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **keywords)
        spans.append((kind, start, time.perf_counter()))
        return result

    return watched
