"""Numbers that change from one captured tick to the next.

A graph reads the same addresses at every replay. So these numbers lie in small tensors:

    numbers   micro-batch of the loss | slot to fill, slot to read   for each ring buffer
              set by the host before the first tick, then counted by every graph
    rates     learning rate of every parameter group
              set by the host when they change
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redivider.pipeline.stages.fused_optimizer import rate_dtype
from redivider.pipeline.stages.stage import Stage

if TYPE_CHECKING:
    from redivider.pipeline.pipeline import Pipeline


class Control:
    """Numbers of captured ticks, on the device.

    It replaces the learning rates of the optimizers' groups by views of a tensor.

    Args:
        pipe: The pipeline.
        device: Its device.
        num_rings: Number of ring buffers; a tick fills one slot of each, and reads one.
    """

    def __init__(self, pipe: "Pipeline", device: torch.device, num_rings: int) -> None:
        self._pipe = pipe
        numbers = torch.zeros(1 + 2 * num_rings, dtype=torch.int64, device=device)
        self._numbers, self.device = numbers, device
        self._sizes = torch.ones_like(numbers[1:])
        self.microbatch = numbers[:1]
        """Micro-batch whose loss the tick computes, one number."""
        self.slots = numbers[1:].view(-1, 2)
        """Slot that the tick fills and slot that it reads, a row for each ring buffer."""
        groups = [group for stage in pipe.stages for group in stage.groups]
        self._rates = torch.zeros(len(groups), dtype=rate_dtype(device), device=device)
        self._sent: tuple[list[float], int] = [], -1
        # Notes the initial rates in the groups, before tensors take their place.
        self._compute_rates([])
        self._group_rates = list(zip(groups, self._rates, strict=True))
        self._take_rates()

    def start(self, microbatch: int, slots: Sequence[int], sizes: Sequence[int]) -> None:
        """Set the numbers of the last tick before the next one, from which ticks count.

        Args:
            microbatch: Micro-batch whose loss it computed.
            slots: Slots of ring buffers that it filled and read.
            sizes: Numbers of slots of these ring buffers.
        """
        _send([microbatch, *slots], self._numbers)
        _send(sizes, self._sizes)

    def advance(self) -> None:
        """Count a tick, in the graph: the host would need a copy for it."""
        self._numbers.add_(1)
        if self._sizes.numel():
            self._numbers[1:].remainder_(self._sizes)

    def send_rates(self, due: Sequence[Stage]) -> None:
        """Fill the learning rates before the next launch, without waiting for the device.

        Args:
            due: Stages that update in this tick.
        """
        if self._pipe._factor is None:
            self._take_rates()
            return
        rates = self._compute_rates(due)
        if (rates, self._rates._version) != self._sent:  # a caller may have set a rate in place
            _send(rates, self._rates)
            self._sent = rates, self._rates._version

    def _take_rates(self) -> None:
        """Copy rates that a caller has set in the groups to where ticks read them."""
        for group, rate in self._group_rates:
            if group["lr"] is not rate:
                group["lr"] = rate.fill_(group["lr"])

    def _compute_rates(self, due: Sequence[Stage]) -> list[float]:
        """Return all learning rates; a stage that does not update keeps that of its last update."""
        rates: list[float] = []
        if self._pipe._factor is None:
            return rates  # the caller sets them
        for stage in self._pipe.stages:
            update = max(0, stage.num_updates - (stage not in due))
            rates += stage.rates(self._pipe._factor(update))
        return rates


def _send(values: Sequence[float], target: Tensor) -> None:
    # The copy may outlive `host`: torch's allocator reuses pinned memory only after it was read.
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(host, non_blocking=True)
