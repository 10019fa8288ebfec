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
        setting: What is trained.
        cut: The units of each stage.
        spread: Whether its stages are in several processes, or all in this one.
        accumulate: Micro-batches per update.
        latency: Ticks that a message travels.
        fill: Whether to fill it now.
    """

    def __init__(
        self,
        setting: Setting,
        cut: list[int],
        *,
        spread: bool = True,
        accumulate: int = 1,
        latency: int = 1,
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
        self.num_until_full = 2 * latency * (len(cut) - 1) + 2
        self.waited: list[tuple[float, float]] = []
        """When it began and ceased to wait for messages."""
        if spread:
            self._watch_waiting()
        if fill:
            self.run(self.num_until_full)

    def run(self, num: int) -> float:
        """Train so many micro-batches; returns the seconds it took."""
        start = time.perf_counter()
        for _ in range(num):
            self.pipe.step(self._images, self._targets)
        return time.perf_counter() - start

    def timed(self) -> float:
        """Seconds of a run, after two ticks that bring all processes into step."""
        self.run(2)
        self.waited.clear()
        return self.run(self._setting.num_microbatches)

    def peak(self, num: int) -> int:
        """Bytes in use at most in so many ticks of a full pipeline, made before it ran."""
        with Live() as live:
            self.run(self.num_until_full)
            live.peak = live.bytes
            self.run(num)
            return live.peak

    @contextmanager
    def spans(self) -> Iterator[list[tuple[str, float, float]]]:
        """Note what is done inside, and when: F, B, and W for waiting."""
        found: list[tuple[str, float, float]] = []
        self.waited.clear()
        with measured_spans(self.pipe) as spans:
            yield found
        found += [(action.kind, *span) for action, span in spans.items()]
        found += [("W", *span) for span in self.waited]

    def stage_seconds(self, num: int) -> list[float]:
        """Seconds of each stage in a tick, where all stages are here."""
        with measured_spans(self.pipe) as spans:
            self.run(num)
        found = [0.0] * len(self.pipe.cut)
        for action, (start, end) in spans.items():
            found[action.stage] += (end - start) / num
        return found

    def close(self) -> None:
        """Train what is in flight, and leave."""
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
        """Of the stages that are here."""
        parameters = (p for stage in self.pipe.stages for p in stage.module.parameters())
        return sum(p.nbytes for p in parameters if isinstance(p, torch.Tensor))


def _apart() -> dict[str, Any]:
    """A group of its own for every pipeline: messages of several in one group would be mixed up."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("stage",))
    return {"mesh": mesh, "device": "cpu", "timeout": 60.0}
