"""Strides of tensors: the order of dimensions in memory, and tensors without gaps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.tree import map_tensors


def dense(tree: Any) -> Any:
    """Return the tree with tensors without gaps; the order of their dimensions in memory stays.

    Half of a tensor (`Split`) has gaps in memory. A saved copy of it has none. Kernels may sum in
    another order where there are gaps, so a resumed run would differ in its last bits. So tensors
    that are kept or sent are made dense.
    """
    return map_tensors(lambda tensor: tensor if is_dense(tensor) else tensor.clone(), tree)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps in memory, and no element twice."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the largest stride to the smallest: 0, 1, ... if contiguous."""
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    strides = tensor.stride()
    return tuple(sorted(dims, key=lambda dim: -strides[dim]))


def inverse(order: Sequence[int]) -> list[int]:
    """Return the order that undoes a permutation of dimensions."""
    return [order.index(dim) for dim in range(len(order))]
