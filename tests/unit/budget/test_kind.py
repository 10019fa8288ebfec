"""Kinds of modules: only those that must behave alike are of one kind."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redivider.budget.kind import kind_of_module


class Layer(nn.Module):
    def __init__(self, **attributes: Any):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)


class Config:
    """Settings, compared by identity."""


class Sizes(dict):
    pass


def same(one: nn.Module, other: nn.Module) -> bool:
    return kind_of_module(one) == kind_of_module(other)


CONFIG = Config()


@pytest.mark.parametrize(
    "value",
    [F.relu, 3, "gelu", None, torch.float16, (1, 2), [1, "a"], {"a": [1]}, {1, 2}, CONFIG],
)
def test_modules_with_equal_attributes_are_of_one_kind(value):
    one = Layer(option=value)
    other = Layer(option=value)
    assert same(one, other) and same(copy.deepcopy(one), one) == (value is not CONFIG)
    assert hash(kind_of_module(one)) == hash(kind_of_module(other))
    with torch.no_grad():
        other.linear.weight.zero_()
    assert same(one, other)


@pytest.mark.parametrize(
    "one, other",
    [
        (F.relu, F.gelu),
        (torch.float16, torch.bfloat16),
        (1, 1.0),
        (1, True),
        (None, 0),
        ([1], (1,)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, Sizes(a=1)),
        ({1}, {2}),
        (Config(), Config()),
        (partial(F.softmax, dim=0), partial(F.softmax, dim=1)),
        (torch.zeros(3), torch.zeros(4)),
    ],
)
def test_modules_with_other_attributes_differ(one, other):
    assert not same(Layer(option=one), Layer(option=other))


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)


def frozen(layer):
    layer.requires_grad_(False)


def transposed(layer):
    layer.linear.weight = nn.Parameter(layer.linear.weight.detach().t())


def evaluated(layer):
    layer.linear.eval()


def compiled(layer):
    layer.compile(backend="eager")


def extended(layer):
    layer.more = nn.Identity()


def indexed(layer):
    layer.layer_idx = 1


@pytest.mark.parametrize(
    "change", [hooked, frozen, transposed, evaluated, compiled, extended, indexed]
)
def test_changed_modules_differ(change):
    one, other = Layer(), Layer()
    assert same(one, other)
    change(other)
    assert not same(one, other)


def test_modules_that_occur_twice_differ():
    linear = nn.Linear(4, 4)
    assert not same(nn.Sequential(linear, linear), nn.Sequential(linear))
    assert not same(nn.Sequential(linear, linear), nn.Sequential(linear, nn.Linear(4, 4)))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apart = copy.deepcopy(tied)
    tied[1].weight = tied[0].weight
    assert not same(tied, apart)
