"""PETRA over processes, and the same pipeline in one process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from setting import Setting, loss, sgd
from torch.distributed.device_mesh import DeviceMesh

import redivider as rd
from redivider.checks.memory import Live
from redivider.pipeline.diagnostics.timeline import measured_spans


class Petra:
    """A pipeline that is kept full.

    Args:
        setting: Model and sizes of the runs.
        cut: The units of each stage.
        spread: Whether its stages are in several processes, or all in this one.
        accumulate: Micro-batches per update.
        latency: Ticks that a message travels.
        fill: Whether to fill the pipeline now.
    """

    def __init__(
        self,
        setting: Setting,
        cut: list[int],
        *,
        spread: bool = True,
        accumulate: int = 1,
        latency: float = 1,
        fill: bool = True,
    ) -> None:
        self._setting = setting
        kind: Any = rd.DistributedPipeline if spread else rd.Pipeline
        self.pipe = kind(
            setting.model("meta" if spread else "cpu"),
            stages=cut,
            loss=loss,
            optimizer=sgd,
            method="petra",
            accumulate=accumulate,
            latency=latency,
            seed=0,
            **(_apart() if spread else {}),
        )
        self._images, self._targets = setting.examples()
        self.num_until_full = self.pipe.schedule.num_in_flight + 2
        self.waited: list[tuple[float, float]] = []
        """Start and end of every wait for messages."""
        if spread:
            self._watch_waiting()
        if fill:
            self.run(self.num_until_full)

    def run(self, num: int) -> float:
        """Train `num` micro-batches; return the seconds."""
        start = time.perf_counter()
        for _ in range(num):
            self.pipe.step(self._images, self._targets)
        return time.perf_counter() - start

    def timed(self) -> float:
        """Return the seconds of a run, after two ticks that align all processes."""
        self.run(2)
        self.waited.clear()
        return self.run(self._setting.num_microbatches)

    def peak(self, num: int) -> int:
        """Return the peak bytes of `num` ticks when full; call it before the first tick."""
        with Live() as live:
            self.run(self.num_until_full)
            live.peak = live.bytes
            self.run(num)
            peak: int = live.peak
        return peak

    @contextmanager
    def spans(self) -> Iterator[list[tuple[str, float, float]]]:
        """Record actions inside the context, with times: F, B, and W for waiting."""
        records: list[tuple[str, float, float]] = []
        self.waited.clear()
        with measured_spans(self.pipe) as spans:
            yield records
        records += [(action.kind, *span) for action, span in spans.items()]
        records += [("W", *span) for span in self.waited]

    def stage_seconds(self, num: int) -> list[float]:
        """Return the seconds of each stage in a tick; all stages must be in this process."""
        with measured_spans(self.pipe) as spans:
            self.run(num)
        seconds = [0.0] * len(self.pipe.cut)
        for action, (start, end) in spans.items():
            seconds[action.stage] += (end - start) / num
        return seconds

    def close(self) -> None:
        """Flush the pipeline and close it."""
        self.pipe.flush()
        if isinstance(self.pipe, rd.DistributedPipeline):
            self.pipe.close()

    def _watch_waiting(self) -> None:
        wait = self.pipe.team.wait

        def watched(*args: Any) -> None:
            start = time.perf_counter()
            wait(*args)
            self.waited.append((start, time.perf_counter()))

        self.pipe.team.wait = watched

    @property
    def num_parameter_bytes(self) -> int:
        """Bytes of the parameters of this process's stages."""
        parameters = (p for stage in self.pipe.stages for p in stage.module.parameters())
        return sum(p.nbytes for p in parameters if isinstance(p, torch.Tensor))


def _apart() -> dict[str, Any]:
    """Return options with a new process group: pipelines that share one would mix messages."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("stage",))
    return {"mesh": mesh, "device": "cpu", "timeout": 60.0}
