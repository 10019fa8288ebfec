"""Trees of tensors: the usual ones are walked without pytree, with its results."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from redivider.tree import map_tensors, tensors_of

Pair = namedtuple("Pair", "one other")
A, B, C = torch.zeros(2), torch.ones(3), torch.arange(4)
TREES = [
    A,
    None,
    (),
    [],
    {},
    (A, None, 3, "text"),
    [A, (B, [C, ()])],
    {"b": B, "a": [A, {}], "none": None},
    (Pair(A, {"c": C}), OrderedDict(b=B)),
    np.arange(3),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tensors_are_those_of_pytree(tree):
    expected = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert [id(tensor) for tensor in tensors_of(tree)] == [id(tensor) for tensor in expected]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_mapped_tree_has_the_form_of_the_first(tree):
    assert str(map_tensors(torch.neg, tree)) == str(tree_map_only(Tensor, torch.neg, tree))
    assert type(map_tensors(torch.neg, tree)) is type(tree)
