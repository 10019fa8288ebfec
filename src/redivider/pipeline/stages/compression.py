"""Compression of messages between stages: none, bf16, or int8 with a scale for every sample.

Every boundary of stages rounds, also one inside a process. So the results do not depend on the
number of processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.tree import map_tensors

MAX_INT8 = 127  # symmetric: -128, which has no opposite, is left out


class Packing:
    """Compression of the tensors of a message.

    Args:
        dtype: Dtype that is sent: torch.bfloat16, torch.int8, or None for the tensors' own.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, torch.bfloat16, torch.int8):
            raise ValueError(
                f"message_dtype must be None, torch.bfloat16 or torch.int8, got {dtype}"
            )
        self.dtype = dtype

    def pack(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors to send: the tensor itself where packing would not shorten it."""
        if not self._shortens(tensor):
            return [tensor]
        if self.dtype == torch.bfloat16:
            return [tensor.to(torch.bfloat16)]
        wide = tensor.float()
        scale = wide.abs().amax(dim=tuple(range(1, wide.dim())), keepdim=True) / MAX_INT8
        # int8 has no NaN: a sample that holds one arrives as NaN through its scale.
        steps = wide / torch.where(scale > 0, scale, 1)
        return [steps.round_().to(torch.int8), scale]

    def unpack(self, packed: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the tensor, rounded, from what `pack` returned."""
        if len(packed) == 1:
            return packed[0].to(dtype)
        steps, scale = packed
        return (steps.float() * scale).to(dtype)

    def rounded(self, tree: Any) -> Any:
        """Return a tree of tensors as it arrives at the other side."""
        if self.dtype is None:
            return tree
        return map_tensors(lambda tensor: self.unpack(self.pack(tensor), tensor.dtype), tree)

    def _shortens(self, tensor: Tensor) -> bool:
        if self.dtype is None or not tensor.is_floating_point():
            return False
        is_larger = tensor.dtype.itemsize > self.dtype.itemsize
        return is_larger and tensor.dim() > 0 and tensor.numel() > 0
