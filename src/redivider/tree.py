"""Nested tuples, lists and dictionaries of tensors, as modules take and return them."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors of a nested structure, in order."""
    if isinstance(tree, Tensor):  # the usual case, which needs no walk
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
