"""Ring buffer of a unit's inputs, for micro-batches in flight in a captured tick.

A CUDA graph reads and writes fixed addresses, but a unit keeps an input for as many ticks as its
delay. So inputs go into a ring of slots, and every tick counts on the device which slot it fills
and which one it reads (runners/control.py). With a delay of 3 ticks:

    micro-batch     micro-batch whose input is in slot
    forwarded       0         1         2         3
    5               4         5 put     2 taken   3
    6               4         5         6 put     3 taken
    7               4 taken   5         6         7 put
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Ring:
    """Ring buffer of the inputs of one unit.

    Args:
        values: Inputs in flight, in order, of equal structure, shapes, strides and dtypes.
        first: Micro-batch of the first one.
        slots: Two integers on the device: the slot that a tick fills, and the one that it reads.
    """

    def __init__(self, values: Sequence[Any], first: int, slots: Tensor) -> None:
        leaves, self._spec = tree_flatten(values[0])
        self.size = len(values) + 1  # a tick may put one input before it takes another
        self._fill_slot, self._read_slot = slots[:1], slots[1:]
        # Of a dense tensor `empty_like` keeps the strides, so channels_last stays channels_last.
        self._like = [torch.empty_like(leaf, device="meta") for leaf in leaves]
        self._memory = [
            torch.zeros((self.size, leaf.numel()), dtype=leaf.dtype, device=leaf.device)
            for leaf in leaves
        ]
        self.fill(values, first)

    def fill(self, values: Sequence[Any], first: int) -> None:
        """Copy the inputs in flight to their slots, outside of a captured tick."""
        for index, value in enumerate(values):
            for memory, flat in zip(self._memory, self._flatten(value), strict=True):
                memory[self.slot(first + index)].copy_(flat)

    def slot(self, microbatch: int) -> int:
        """Return the slot of a micro-batch's input."""
        return microbatch % self.size

    def get(self, microbatch: int) -> Any:
        """Return a copy of a micro-batch's input, outside of a captured tick."""
        slot = self.slot(microbatch)
        return self._unflatten([memory[slot].clone() for memory in self._memory])

    def put(self, value: Any) -> None:
        """Copy an input to the slot to fill, in a tick that is being captured."""
        # Slots are read on the device: an index on the host would be a constant of the graph.
        for memory, flat in zip(self._memory, self._flatten(value), strict=True):
            memory.index_copy_(0, self._fill_slot, flat.unsqueeze(0))

    def take(self) -> Any:
        """Return the input in the slot to read, in a tick that is being captured."""
        rows = [memory.index_select(0, self._read_slot).squeeze(0) for memory in self._memory]
        return self._unflatten(rows)

    def _flatten(self, value: Any) -> list[Tensor]:
        """Return the tensors of a value as vectors, in the order of memory."""
        rows = []
        for leaf, like in zip(tree_flatten(value)[0], self._like, strict=True):
            if leaf.stride() != like.stride():
                leaf = torch.empty_like(like, device=leaf.device).copy_(leaf)
            rows.append(leaf.detach().as_strided((leaf.numel(),), (1,)))
        return rows

    def _unflatten(self, rows: Sequence[Tensor]) -> Any:
        """Return the value, with shapes and strides of its own, from such vectors."""
        pairs = zip(rows, self._like, strict=True)
        leaves = [row.as_strided(like.shape, like.stride()) for row, like in pairs]
        return tree_unflatten(leaves, self._spec)
