"""Structures of tensors: tuples, lists and dictionaries, as modules take and give them."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(tree: Any) -> list[Tensor]:
    """All of them, in order; most structures are one tensor, which needs no walk."""
    if isinstance(tree, Tensor):
        return [tree]
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
