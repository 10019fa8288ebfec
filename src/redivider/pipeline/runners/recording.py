"""Context of a tick that is recorded, where the host can neither read values nor branch on them."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.runners.control import Control
from redivider.pipeline.runners.cuda_graphs import Graphs, Replay
from redivider.pipeline.runners.tick_context import Kind, TickContext
from redivider.pipeline.schedule import KINDS, Schedule
from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.stage import Stage

NONE = 2**62  # larger than any micro-batch index


class Recording(TickContext):
    """Context of ticks that are recorded, one phase after the other.

    A stage has two lanes, because its forward and its backward belong to different micro-batches.
    The last stage has only one: there the backward follows the forward of the same micro-batch. The
    update changes weights that the forward reads, so it comes after the forward, or before it where
    the schedule says so. Lanes of neighbours depend on each other only if a message is read in the
    tick that sends it.

    A loss that is NaN or infinite sets a flag on the device. The flag stops all later updates:
    those of the last stage in the same tick, those of the other stages from the next tick on.

    Args:
        graphs: Recorder of the lanes.
        schedule: Schedule of the pipeline.
        own: Stages of this process.
        num_phases: Number of recorded ticks; each has a flag of its own.
        control: Numbers on the device that a tick reads.
    """

    def __init__(
        self,
        graphs: Graphs,
        schedule: Schedule,
        own: range,
        num_phases: int,
        control: Control,
    ) -> None:
        self._graphs, self._schedule, self._own = graphs, schedule, own
        self._is_forked = False
        self._held: list[Message] = []
        self._control = control
        self._faults = [torch.zeros((), device=control.device) for _ in range(num_phases)]
        self.first_bad = torch.full_like(control.microbatch, NONE)
        """First micro-batch whose loss was NaN or infinite; `NONE` if there is none."""
        self.phase = 0
        self._has_begun = False

    def begin_phase(self, phase: int, updating: Iterable[int]) -> None:
        """Begin to record a tick.

        The stages that update in it go first: a tick ends with the last of its lanes, and theirs
        are the longest.

        Args:
            phase: Index of the tick in the cycle.
            updating: Stages that update in it.
        """
        self.phase, self._has_begun = phase, False
        self._graphs.prefer({self._lane(kind, stage) for stage in updating for kind in KINDS})

    def lane(self, kind: Kind, stage: int) -> AbstractContextManager[Any]:
        schedule, wait = self._schedule, self._graphs.wait
        if not self._has_begun:
            self._has_begun = True
            self._graphs.fork()  # a part begins here
            self._control.advance()
        if not self._is_forked:
            self._is_forked = True
            self._graphs.fork()
        forward, backward = self._lane("F", stage), self._lane("B", stage)
        if kind == "U":
            wait(backward, forward)
        elif kind == "F":
            if schedule.runs_backward_first(stage):
                wait(forward, backward)  # for the update
            if stage > self._own[0] and schedule.is_read_at_once("up", stage):
                wait(forward, self._lane("F", stage - 1))
        elif stage < self._own[-1] and schedule.is_read_at_once("down", stage):
            wait(backward, self._lane("B", stage + 1))
        return self._graphs.lane(forward if kind == "F" else backward)

    def join(self) -> None:
        """Order the next work after all lanes, and release what was held for them."""
        self._graphs.fork()  # a part begins here, if none has begun
        self._graphs.join()
        self._is_forked = False
        self._held.clear()

    def cut(self) -> Replay | None:
        """End a part of the tick, if one has begun; return a function that replays it."""
        if self._is_forked:
            self.join()
        return self._graphs.cut()

    def _lane(self, kind: Kind, stage: int) -> int:
        place, num = stage - self._own[0], len(self._own)
        is_last = stage == self._schedule.num_stages - 1
        return place if kind == "F" and not is_last else num + place

    def hold(self, message: Message) -> None:
        """Keep a message until lanes join: its memory belongs to the lane that sent it."""
        if self._schedule.num_groups > 1:
            self._held.append(message)

    def guard(self, loss: Tensor, microbatch: int) -> None:
        loss = loss.detach()
        bad = (loss - loss).ne(0)  # inf - inf is NaN, too; fewer kernels than isfinite
        candidate = torch.where(bad, self._control.microbatch, NONE)
        torch.minimum(self.first_bad, candidate, out=self.first_bad)
        # The flag of the phase before the first one is that of the last: a cycle hands it on.
        before, current = self._faults[self.phase - 1], self._faults[self.phase]
        torch.maximum(before, bad, out=current)

    def set_rate(self, stage: Stage, factor: float) -> None:
        """Do nothing: the host sends the rates before a replay (`control.Control`)."""

    def fault_seen_by(self, stage: int) -> Tensor:
        """Return the flag that stops a stage's update; optimizers call it `found_inf`.

        Only the last stage reads the flag of its own tick. The others run beside it.
        """
        is_last = stage == self._schedule.num_stages - 1
        return self._faults[self.phase if is_last else self.phase - 1]
