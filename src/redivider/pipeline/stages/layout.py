"""What is kept and what travels is dense: then a copy of it is laid out as it is.

A half of a tensor (`Split`) has gaps. Kernels may add in another order where there are gaps than
where there are none, so that a state that was saved, which has none, would go on by other last bits
than the pipeline that it was taken of.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def dense(tree: Any) -> Any:
    """The same, its tensors without gaps and in the order of dimensions that they have."""
    if isinstance(tree, Tensor):
        return _dense(tree)
    if type(tree) is tuple and all(isinstance(each, Tensor) for each in tree):
        return tuple(map(_dense, tree))  # streams, at almost every call
    return tree_map_only(Tensor, _dense, tree)


def is_dense(tensor: Tensor) -> bool:
    """Whether it has no gaps, and no number twice."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if is_dense(tensor) else tensor.clone()


def order_of(tensor: Tensor) -> list[int]:
    """Dimensions from the widest stride to the narrowest; 0, 1, 2 and so on where contiguous."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda each: (-strides[each], each))
