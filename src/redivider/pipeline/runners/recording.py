"""The surroundings of a tick that is recorded, where the host can neither read nor decide."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.runners.cuda_graphs import Graphs
from redivider.pipeline.runners.surroundings import Around, Kind
from redivider.pipeline.stages.stage import Stage

NONE = 2**62  # more than any micro-batch


class Recording(Around):
    """The surroundings of ticks that are being recorded, one phase after the other.

    A stage has two lanes, since its forward and its backward are of different micro-batches; its
    update comes after both. The last one has but one: there the backward follows the forward.

    A loss that is not a number sets a flag on the device, which holds up all updates from then on:
    those of the last stage at once, those of the others from the next tick.

    Args:
        graphs: What records.
        num_stages: Of the pipeline.
        num_phases: How many ticks are recorded; each has a flag of its own.
        microbatch: One number on the device: the micro-batch that meets its loss.
    """

    def __init__(
        self, graphs: Graphs, num_stages: int, num_phases: int, microbatch: Tensor
    ) -> None:
        self._graphs = graphs
        self._num_stages = num_stages
        self._microbatch = microbatch
        device = microbatch.device
        self._faults = [torch.zeros((), device=device) for _ in range(num_phases)]
        self.first_bad = torch.full_like(microbatch, NONE)
        """The first micro-batch whose loss was not a number."""
        self.phase = 0

    def lane(self, kind: Kind, stage: int) -> AbstractContextManager[Any]:
        forward, backward = stage, self._num_stages + stage
        if stage == self._num_stages - 1:
            forward = backward
        if kind == "U":
            self._graphs.wait(backward, forward)
        return self._graphs.lane(forward if kind == "F" else backward)

    def guard(self, loss: Tensor, microbatch: int) -> None:
        loss = loss.detach()
        bad = (loss - loss).ne(0)  # so are infinities; in as few kernels as can be
        found = torch.where(bad, self._microbatch, NONE)
        torch.minimum(self.first_bad, found, out=self.first_bad)
        before, now = self._faults[self.phase - 1], self._faults[self.phase]
        torch.maximum(before, bad, out=now)

    def set_rate(self, stage: Stage, factor: float) -> None:
        """The host does it before a replay."""

    def fault_seen_by(self, stage: int) -> Tensor:
        """What holds up a stage's update; an optimizer knows it as `found_inf`."""
        return self._faults[self.phase if stage == self._num_stages - 1 else self.phase - 1]
