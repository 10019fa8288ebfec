"""Memory layout of kept and sent tensors: dense, so that a restored copy has the same strides.

Half of a tensor (`Split`) has gaps in memory. A saved copy of it has none. Kernels may sum in
another order where there are gaps, so the resumed run would differ in its last bits.
"""

from typing import Any

import torch
from torch import Tensor

from redivider.tree import map_tensors


def dense(tree: Any) -> Any:
    """Return the tree with tensors without gaps; the order of their dimensions in memory stays."""
    if isinstance(tree, Tensor):
        return _dense(tree)
    return map_tensors(_dense, tree)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps in memory, and no element twice."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if is_dense(tensor) else tensor.clone()


def order_of(tensor: Tensor) -> list[int]:
    """Return the dimensions from the largest stride to the smallest: 0, 1, ... if contiguous."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
