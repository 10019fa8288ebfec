"""What numbers become between stages: themselves, bf16, or a byte each with a scale for a sample.

Every boundary of stages rounds, whether or not a process ends there, so that the numbers do not
depend on the number of processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

LARGEST = 127  # of a signed byte, without the one that has no opposite


class Packing:
    """How the tensors of a message are packed.

    Args:
        dtype: None for not at all, torch.bfloat16, or torch.int8.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, torch.bfloat16, torch.int8):
            raise ValueError(
                f"message_dtype must be None, torch.bfloat16 or torch.int8, got {dtype}"
            )
        self.dtype = dtype

    def pack(self, tensor: Tensor) -> list[Tensor]:
        """What travels of a tensor: itself if it is no longer than a packed one would be."""
        if not self._packs(tensor):
            return [tensor]
        if self.dtype == torch.bfloat16:
            return [tensor.to(torch.bfloat16)]
        wide = tensor.float()
        scale = wide.abs().amax(dim=tuple(range(1, wide.dim())), keepdim=True) / LARGEST
        steps = wide / torch.where(scale > 0, scale, 1)  # not a number stays so, by its scale
        return [steps.round_().to(torch.int8), scale]

    def unpack(self, packed: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What the other side makes of it."""
        if len(packed) == 1:
            return packed[0].to(dtype)
        steps, scale = packed
        return (steps.float() * scale).to(dtype)

    def rounded(self, tree: Any) -> Any:
        """What arrives of a tree of tensors."""
        if self.dtype is None:
            return tree
        return tree_map_only(Tensor, lambda each: self.unpack(self.pack(each), each.dtype), tree)

    def _packs(self, tensor: Tensor) -> bool:
        if self.dtype is None or not tensor.is_floating_point():
            return False
        is_larger = tensor.dtype.itemsize > self.dtype.itemsize
        return is_larger and tensor.dim() > 0 and tensor.numel() > 0
