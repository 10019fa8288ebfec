"""PaReprop: the second run of a unit beside the pull-back of the one after it, on two CUDA streams.

Zhu and Mangalam 2023. In a backward, R(i) runs unit i again (recovering a coupling's input) and
B(i) pulls gradients back through it. R(i-1) needs R(i); B(i) needs R(i) and B(i+1). So R(i-1) and
B(i) may run side by side, and autograd runs B(i) on the CUDA stream where R(i) ran:

    lane 0, the caller's:  R(3) B(3) | R(1) .... | B(1)
    lane 1, beside it:          R(2) | B(2) R(0) | .... B(0)

A compiled module is one node, which can be called anywhere (replay/compiled_node.py); then all B
run on the caller's lane, and all R on the other one where there are more than two.

Order comes from events, so the host never waits. Lifetime comes from references: a tensor that one
lane made and the other one reads is let go only when the first one has waited for the reader.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MAIN, SIDE = 0, 1
Lane = int


class Job(Protocol):
    """The backward of one unit in two parts."""

    @property
    def key(self) -> Any:
        """What tells it from others."""

    @property
    def is_compiled(self) -> bool:
        """Whether B can probably run anywhere."""

    @property
    def has_before(self) -> bool:
        """Whether the backward probably goes on to a unit that can be prepared."""

    def before(self) -> "Job | None":
        """The next unit of the backward, if it can be prepared already."""

    def prepare(self) -> Any:
        """R: run the unit again."""

    def is_bound(self, prepared: Any) -> bool:
        """Whether B must run where R ran."""

    def finish(self, prepared: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """B: pull gradients back."""


class Lanes(ABC):
    """Two queues of work, and events between them."""

    @abstractmethod
    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Let what is run inside go to a lane."""

    @abstractmethod
    def mark(self, lane: Lane) -> Any:
        """An event behind all that the lane has been given."""

    @abstractmethod
    def wait(self, lane: Lane, event: Any) -> None:
        """Let all that the lane will be given come after an event."""


class CudaLanes(Lanes):
    """The CUDA stream of the caller, and one beside it that all chains on that stream share."""

    _beside: dict[tuple[torch.device, int], torch.cuda.Stream] = {}  # noqa: RUF012

    def __init__(self, device: torch.device) -> None:
        main = torch.cuda.current_stream(device)
        key = device, main.cuda_stream
        if key not in self._beside:
            self._beside[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams = (main, self._beside[key])

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[lane])

    def mark(self, lane: Lane) -> Any:
        return self._streams[lane].record_event()

    def wait(self, lane: Lane, event: Any) -> None:
        self._streams[lane].wait_event(event)


class _Ready(NamedTuple):
    prepared: Any
    lane: Lane
    event: Any


class Overlap:
    """Runs the backward of consecutive units, each prepared while the one after it finishes.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: Lanes
        self._ready: dict[Any, _Ready] = {}
        self._held: list[torch.UntypedStorage] = []

    def step(self, this: Job, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Finish one unit, and prepare the one before it meanwhile.

        Gradients are ready on the caller's stream when this is called, and when it returns.
        """
        before = this.before()
        ready = self._ready.pop(this.key, None) or self._begin(this, before)
        lanes, own = self._lanes, ready.lane if this.is_bound(ready.prepared) else MAIN
        arrived = lanes.mark(MAIN)  # the gradients; what is prepared on this lane comes behind
        if before is not None:
            # The side lane also waits for what autograd has done on the main one since the last
            # step: it may have let go of memory that belongs to the side lane.
            self._prepare(before, 1 - own, ready.event if own == SIDE else arrived)
        if own == SIDE:
            lanes.wait(SIDE, arrived)
            self._held.clear()  # their readers on the other lane came before `arrived`
        elif ready.lane == SIDE:
            lanes.wait(MAIN, ready.event)
        try:
            with lanes.on(own):
                found = this.finish(ready.prepared, grads)
        except BaseException:
            if own == SIDE:  # a capture cannot end, not even in vain, while it runs apart
                lanes.wait(MAIN, lanes.mark(SIDE))
            self.end()
            raise
        if own == SIDE:
            lanes.wait(MAIN, lanes.mark(SIDE))
            # Autograd will add these up on the main lane and let them go, while this lane goes on.
            # A reference to the tensor itself would make it copy them.
            self._held = [each.untyped_storage() for each in found if each is not None]
        if before is None:  # this lane goes on only after waiting for the other one
            self._held.clear()
        return found

    def _begin(self, job: Job, before: Job | None) -> _Ready:
        """Prepare the first one of a backward, which nobody has prepared.

        There is nothing to run it beside. But where all others will be prepared on the side lane,
        which then holds two graphs at a time, this one's would be a third, in the main lane's
        memory. Of two units, each lane had better hold one.
        """
        self.end()
        self._lanes = self._make_lanes()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)
        if job.is_compiled and before is not None and before.has_before:
            self._prepare(job, SIDE, self._lanes.mark(MAIN))
        ready = self._ready.pop(job.key, None)
        return ready or _Ready(job.prepare(), MAIN, self._lanes.mark(MAIN))

    def _prepare(self, job: Job, lane: Lane, after: Any) -> None:
        self._lanes.wait(lane, after)
        try:
            with self._lanes.on(lane):
                prepared = job.prepare()
        except Exception:  # no memory, or its own fault: its own turn will tell, if it comes
            if lane == SIDE:
                self._lanes.wait(MAIN, self._lanes.mark(SIDE))
            return
        self._ready[job.key] = _Ready(prepared, lane, self._lanes.mark(lane))

    def end(self) -> None:
        """Let go of what was prepared and not asked for, as when only some gradients are wanted."""
        if self._ready:
            self._lanes.wait(MAIN, self._lanes.mark(SIDE))
            self._ready.clear()

    def _make_lanes(self) -> Lanes:
        return CudaLanes(self._device)
