"""Nested tuples, lists and dictionaries of tensors, as modules take and return them.

The usual trees are a tensor, none, or a few: these need no walk by pytree, which costs more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors of a nested structure, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if not _is_plain(tree):
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [tensor for item in tree or () for tensor in tensors_of(item)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a nested structure with a function's results in place of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if not _is_plain(tree):
        return tree_map_only(Tensor, function, tree)
    return tree and type(tree)([map_tensors(function, item) for item in tree])


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without its history, of which a backward would free the graph."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all dense tensors of a nested structure, in order."""
    return [x.untyped_storage() for x in tensors_of(tree) if x.layout is torch.strided]


def _is_plain(tree: Any) -> bool:
    """Return whether a tree is None, a tuple, a list or an empty dictionary."""
    return tree is None or type(tree) in (tuple, list) or (type(tree) is dict and not tree)
