"""Models and inputs that plans refuse in one line, and those that they take."""

from typing import Any

import pytest
import torch
from support.budgets import smallest_budget
from torch import nn

import redivider as rd
from redivider.budget.measure import measure


def make(depth=3, **names) -> rd.Chain:
    units = [rd.Coupling(nn.Linear(8, 8)) for _ in range(depth)]
    return rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *units, rd.Fuse("add")], **names)


def compiled(model) -> Any:
    return torch.compile(model, backend="eager")


X = torch.randn(16, 6)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (
            lambda: rd.plan(nn.Linear(2, 2), X),
            TypeError,
            r"takes a Chain or a network of rd\.make_reversible, got Linear",
        ),
        (lambda: rd.plan(make().requires_grad_(False), X), ValueError, "no gradient"),
        (lambda: rd.plan(make(), x=X), TypeError, r"no name: rd\.plan\(model, x"),
        (lambda: rd.plan(make()), TypeError, r"no name: rd\.plan\(model, x"),
        (lambda: rd.plan(make(), X, mask=X), TypeError, "no unit takes the keyword 'mask'"),
        (
            lambda: rd.plan(compiled(make()), X),
            ValueError,
            r"not torch\.compile\(model\)",
        ),
        (lambda: setattr(make(), "backward", 3), TypeError, "a name, or a list of names, got 3"),
        (lambda: setattr(make(), "backward", [3] * 6), ValueError, "must be one of"),
    ],
)
def test_plans_refuse(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_inference_mode():
    with torch.inference_mode():
        x = torch.randn(16, 6)
        with pytest.raises(ValueError, match=r"torch\.inference_mode\(\)"):
            rd.plan(make(), X)
    with pytest.raises(ValueError, match=r"torch\.inference_mode\(\)"):
        rd.plan(make(), x)


@pytest.fixture(scope="module")
def plan():
    return rd.plan(make(), X, memory="1GiB")


def other_kind():
    model = make()
    return rd.Chain([*model[:3], rd.Coupling(nn.Sequential(nn.Linear(8, 8))), *model[4:]])


@pytest.mark.parametrize(
    "model, kind, message",
    [
        ([make()], TypeError, "apply takes a Chain or a network .*, got list"),
        (nn.Sequential(make()), TypeError, "apply takes a Chain or a network .*, got Sequential"),
        (make(4), ValueError, "another model: it has 6 units, and here are 7; make a new one"),
        (
            other_kind(),
            ValueError,
            r"another model: it has 'unit 3, Coupling\(Linear\)', and here is 'unit 3, Coupling\(S",
        ),
    ],
)
def test_models_of_which_it_is_not(plan, model: Any, kind, message):
    before = getattr(model, "backward", None)
    with pytest.raises(kind, match=message):
        plan.apply(model)
    assert getattr(model, "backward", None) == before


def test_it_applies_to_what_is_inside_of_torch_compile(plan):
    model = make()
    wrapped = compiled(model)
    assert plan.apply(wrapped) is wrapped
    assert model.backward == plan.choices


def test_it_applies_after_units_have_been_sharded(plan):
    """As by `fully_shard`, which derives the class of a module."""
    model = make()
    for module in (model[0], model[2].f):
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    assert plan.apply(model).backward == plan.choices


def test_sparse_gradients():
    model = rd.Chain([nn.Embedding(500, 8, sparse=True), *make()[1:]])
    tokens = torch.randint(500, (4, 8))
    least = smallest_budget(model, tokens, unit="unit")
    plan = rd.plan(model, tokens, memory=least)
    assert plan.measured == least <= plan.predicted


def test_units_that_can_only_be_stored():
    """One writes into its input, so it cannot run twice."""
    model = rd.Chain([nn.Linear(6, 8), nn.ReLU(inplace=True), *make()[1:]])
    choices = [[option.choice for option in own] for own in measure(model, X, {}, sum_of).units]
    assert choices[:2] == [["store", "checkpoint"], ["store"]]
    assert rd.plan(model, X, memory=smallest_budget(model, X, unit="unit"))[1] == "store"


def sum_of(y):
    return y.sum()
