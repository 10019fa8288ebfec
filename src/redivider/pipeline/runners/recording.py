"""Context of a tick that is recorded, where the host can neither read values nor branch on them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.runners.cuda_graphs import Graphs
from redivider.pipeline.runners.tick_context import Kind, TickContext
from redivider.pipeline.stages.stage import Stage

NONE = 2**62  # larger than any micro-batch index


class Recording(TickContext):
    """Context of ticks that are recorded, one phase after the other.

    A stage has two lanes, because its forward and its backward belong to different micro-batches.
    Its update comes after both. The last stage has only one: there the backward follows the
    forward of the same micro-batch.

    A loss that is NaN or infinite sets a flag on the device. The flag stops all later updates:
    those of the last stage in the same tick, those of the other stages from the next tick on.

    Args:
        graphs: Recorder of the lanes.
        num_stages: Number of stages.
        num_phases: Number of recorded ticks; each has a flag of its own.
        microbatch: One number on the device: the micro-batch whose loss the tick computes.
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
        """First micro-batch whose loss was NaN or infinite; `NONE` if there is none."""
        self.phase = 0

    def lane(self, kind: Kind, stage: int) -> AbstractContextManager[Any]:
        forward, backward = stage, self._num_stages + stage
        if stage == self._num_stages - 1:
            forward = backward
        if kind == "U":  # the forward reads the weights that the update changes
            self._graphs.wait(backward, forward)
        return self._graphs.lane(forward if kind == "F" else backward)

    def guard(self, loss: Tensor, microbatch: int) -> None:
        loss = loss.detach()
        bad = (loss - loss).ne(0)  # inf - inf is NaN, too; fewer kernels than isfinite
        candidate = torch.where(bad, self._microbatch, NONE)
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
        return self._faults[self.phase if stage == self._num_stages - 1 else self.phase - 1]
