"""Inputs of micro-batches in flight, in memory that stays where it is.

A captured tick reads and writes the same addresses whenever it is replayed. So what a unit keeps
for as many ticks as its delay goes into a ring of slots, and the host tells the device which slot
to fill and which one to read (runners/control.py).
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
        slots: Two numbers on the device: the slot that a tick fills, and the one that it reads.
    """

    def __init__(self, values: Sequence[Any], first: int, slots: Tensor) -> None:
        leaves, self._spec = tree_flatten(values[0])
        self._size = len(values) + 1  # a forward may come before the backward of the same tick
        self._filled, self._read = slots[:1], slots[1:]
        # One that is dense keeps its strides: channels_last stays what it is.
        self._like = [torch.empty_like(each, device="meta") for each in leaves]
        self._memory = [
            torch.zeros((self._size, each.numel()), dtype=each.dtype, device=each.device)
            for each in leaves
        ]
        self.fill(values, first)

    def fill(self, values: Sequence[Any], first: int) -> None:
        """Take in what is in flight."""
        for index, value in enumerate(values):
            for memory, each in zip(self._memory, self._flat(value), strict=True):
                memory[self.slot(first + index)].copy_(each)

    def slot(self, microbatch: int) -> int:
        """Where a micro-batch's input lies."""
        return microbatch % self._size

    def get(self, microbatch: int) -> Any:
        """A copy of what a micro-batch has left, by the host's own count."""
        slot = self.slot(microbatch)
        return self._shaped([memory[slot].clone() for memory in self._memory])

    def put(self, value: Any) -> None:
        """Keep an input, in a tick that is being recorded."""
        for memory, each in zip(self._memory, self._flat(value), strict=True):
            memory.index_copy_(0, self._filled, each.unsqueeze(0))

    def take(self) -> Any:
        """Get the one back that is due, in a tick that is being recorded."""
        found = [memory.index_select(0, self._read).squeeze(0) for memory in self._memory]
        return self._shaped(found)

    def _flat(self, value: Any) -> list[Tensor]:
        flat = []
        for each, like in zip(tree_flatten(value)[0], self._like, strict=True):
            if each.stride() != like.stride():
                each = torch.empty_like(like, device=each.device).copy_(each)
            flat.append(each.detach().as_strided((each.numel(),), (1,)))
        return flat

    def _shaped(self, flat: Sequence[Tensor]) -> Any:
        pairs = zip(flat, self._like, strict=True)
        shaped = [each.as_strided(like.shape, like.stride()) for each, like in pairs]
        return tree_unflatten(shaped, self._spec)
