"""Inputs of micro-batches in flight, in memory that stays where it is.

A captured tick reads and writes the same addresses whenever it is replayed. So what a unit keeps
for as many ticks as its delay goes into a ring of slots, and the slot is computed on the device:
the micro-batch that enters, by a clock there, and how far behind it this unit is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Ring:
    """Slots for the inputs of one unit.

    Args:
        values: Those in flight, in order; all alike.
        first: The micro-batch of the first one.
        clock: One number on the device: the micro-batch that enters in the tick.
    """

    def __init__(self, values: Sequence[Any], first: int, clock: Tensor) -> None:
        flat = [tree_flatten(value) for value in values]
        self._spec = flat[0][1]
        self._size = len(values) + 1  # a forward comes before the backward of the same tick
        self._clock = clock
        self.entering = first
        """The micro-batch that enters, as the host sees it while a tick is recorded."""
        self._slots = [
            torch.zeros((self._size, *each.shape), dtype=each.dtype, device=each.device)
            for each in flat[0][0]
        ]
        self.fill(values, first)

    def fill(self, values: Sequence[Any], first: int) -> None:
        """Take in what is in flight."""
        for index, value in enumerate(values):
            for slots, each in zip(self._slots, tree_flatten(value)[0], strict=True):
                slots[(first + index) % self._size].copy_(each)

    def get(self, microbatch: int) -> Any:
        """A copy of what a micro-batch has left, by the host's own count."""
        found = [slots[microbatch % self._size].clone() for slots in self._slots]
        return tree_unflatten(found, self._spec)

    def put(self, microbatch: int, value: Any) -> None:
        """Keep an input, in a tick that is being recorded."""
        slot = self._slot(microbatch)
        for slots, each in zip(self._slots, tree_flatten(value)[0], strict=True):
            slots.index_copy_(0, slot, each.detach().unsqueeze(0))

    def take(self, microbatch: int) -> Any:
        """Get it back, in a tick that is being recorded."""
        slot = self._slot(microbatch)
        found = [slots.index_select(0, slot).squeeze(0) for slots in self._slots]
        return tree_unflatten(found, self._spec)

    def _slot(self, microbatch: int) -> Tensor:
        behind = microbatch - self.entering
        return (self._clock + behind).remainder(self._size)
