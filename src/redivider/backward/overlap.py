"""PaReprop: rerun a unit beside the pull-back of the unit after it, on two CUDA streams.

Zhu and Mangalam 2023. In a backward, R(i) runs unit i again (recovering a coupling's input) and
B(i) pulls gradients back through it. R(i-1) needs R(i); B(i) needs R(i) and B(i+1). So R(i-1) and
B(i) may run side by side. Autograd runs B(i) on the CUDA stream where R(i) ran:

    lane 0, the caller's:  R(3) B(3) | R(1) .... | B(1)
    lane 1, beside it:          R(2) | B(2) R(0) | .... B(0)

A compiled module is one node, which can be called on any stream (replay/compiled_node.py). Then all
B run on the caller's lane, and all R on the other one if there are more than two.

Events order the lanes, so the host never waits. References control lifetimes: a tensor that one
lane allocated and the other one reads is released only after the first one has waited for the
reader.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from redivider._torch_private import after_backward

MAIN, SIDE = 0, 1
Lane = int


class Job(Protocol):
    """The backward of one unit, in two parts: R, the rerun, and B, the pull-back."""

    @property
    def key(self) -> Any:
        """Identity of the unit."""

    @property
    def is_compiled(self) -> bool:
        """True if B can probably run on any stream."""

    @property
    def has_before(self) -> bool:
        """True if the backward probably continues to a unit that can be prepared."""

    def before(self) -> "Job | None":
        """Return the next unit of the backward, if it can be prepared already."""

    def prepare(self) -> Any:
        """Run the unit again (R)."""

    def is_bound(self, prepared: Any) -> bool:
        """Return whether B must run on the stream where R ran."""

    def finish(self, prepared: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Pull gradients back (B)."""


class Lanes(ABC):
    """Two queues of work, and events between them."""

    @abstractmethod
    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Run the body of a `with` on a lane."""

    @abstractmethod
    def mark(self, lane: Lane) -> Any:
        """Record an event after all work of the lane so far."""

    @abstractmethod
    def wait(self, lane: Lane, event: Any) -> None:
        """Make all future work of the lane wait for an event."""


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
    """Result of R, the lane where it ran, and an event after it."""

    prepared: Any
    lane: Lane
    event: Any


class Overlap:
    """Scheduler of a backward: prepares every unit while the one after it finishes.

    Args:
        device: Device of the units.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: Lanes
        self._ready: dict[Any, _Ready] = {}
        self._held: list[torch.UntypedStorage] = []

    def step(self, job: Job, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Finish one unit, and prepare the one before it at the same time.

        Gradients are ready on the caller's stream when this is called, and when it returns.
        """
        before = job.before()
        ready = self._ready.pop(job.key, None) or self._begin(job, before)
        lanes, own = self._lanes, ready.lane if job.is_bound(ready.prepared) else MAIN
        arrived = lanes.mark(MAIN)  # the gradients, ahead of what is prepared on this lane
        if before is not None:
            # The side lane also waits for what autograd has done on the main one since the last
            # step: autograd may have released memory that belongs to the side lane.
            self._prepare(before, 1 - own, ready.event if own == SIDE else arrived)
        if own == SIDE:
            lanes.wait(SIDE, arrived)
            self._held.clear()  # their readers on the main lane came before `arrived`
        elif ready.lane == SIDE:
            lanes.wait(MAIN, ready.event)
        try:
            with lanes.on(own):
                input_grads = job.finish(ready.prepared, grads)
        except BaseException:
            if own == SIDE:  # a capture cannot end, even by an error, before the lanes have joined
                lanes.wait(MAIN, lanes.mark(SIDE))
            self.end()
            raise
        if own == SIDE:
            lanes.wait(MAIN, lanes.mark(SIDE))
            # Autograd will accumulate these on the main lane and release them, while the side lane
            # continues. A reference to the tensors themselves would make autograd copy them.
            self._held = [grad.untyped_storage() for grad in input_grads if grad is not None]
        if before is None:  # the side lane continues only after waiting for the main one
            self._held.clear()
        return input_grads

    def _begin(self, job: Job, before: Job | None) -> _Ready:
        """Prepare the first unit of a backward, which has nothing to run beside.

        Compiled units are all prepared on the side lane, which then holds two graphs at a time. The
        graph of the first unit would be a third one, in the memory of the main lane, so the side
        lane prepares it too. With only two units, every lane holds one.
        """
        self.end()
        self._lanes = self._make_lanes()
        after_backward(self.end)
        if job.is_compiled and before is not None and before.has_before:
            self._prepare(job, SIDE, self._lanes.mark(MAIN))
        ready = self._ready.pop(job.key, None)
        return ready or _Ready(job.prepare(), MAIN, self._lanes.mark(MAIN))

    def _prepare(self, job: Job, lane: Lane, after: Any) -> None:
        self._lanes.wait(lane, after)
        try:
            with self._lanes.on(lane):
                prepared = job.prepare()
        except Exception:  # out of memory, or a fault of the unit, which its own turn will raise
            if lane == SIDE:
                self._lanes.wait(MAIN, self._lanes.mark(SIDE))
            return
        self._ready[job.key] = _Ready(prepared, lane, self._lanes.mark(lane))

    def end(self) -> None:
        """Release units that were prepared but unused, as when only some gradients are needed."""
        if self._ready:
            self._lanes.wait(MAIN, self._lanes.mark(SIDE))
            self._ready.clear()

    def _make_lanes(self) -> Lanes:
        return CudaLanes(self._device)
