"""The surroundings of a tick that is recorded, where the host can neither read nor decide."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.around import Around
from redivider.pipeline.graphs import Graphs
from redivider.pipeline.stage import Stage


class Recording(Around):
    """The surroundings of a tick that is being recorded.

    A loss that is not a number sets a flag on the device, which holds up all updates from then on:
    those of the last stage at once, those of the others from the next tick.
    """

    def __init__(self, graphs: Graphs, clock: Tensor, num_behind: int) -> None:
        self._graphs = graphs
        self._clock = clock
        self._num_behind = num_behind
        self.fault = torch.zeros((), device=clock.device)
        """Whether there was one before this tick; an optimizer knows it as `found_inf`."""
        self.new_fault = torch.zeros_like(self.fault)
        self.microbatch = torch.full_like(clock, -1)
        """The first one whose loss was not a number."""

    def lane(self, stage: int) -> AbstractContextManager[Any]:
        return self._graphs.lane(stage)

    def guard(self, loss: Tensor, microbatch: int) -> None:
        bad = loss.detach().isfinite().logical_not()
        first = bad & (self.new_fault == 0)
        self.microbatch.copy_(torch.where(first, self._clock - self._num_behind, self.microbatch))
        self.new_fault.copy_(torch.maximum(self.new_fault, bad.float()))

    def set_rate(self, stage: Stage, factor: float) -> None:
        """The host does it before a replay."""

    def end_tick(self) -> None:
        """When all lanes are done: let faults be known to all, and the clock go on."""
        self.fault.copy_(self.new_fault)
        self._clock.add_(1)
