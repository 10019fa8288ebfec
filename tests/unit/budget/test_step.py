"""Real steps of planned models take no more than the budget."""

from typing import Any

import pytest
import torch
from support.budgets import choices_of, predict, smallest_budget
from torch import nn

import redivider as rd
from redivider.budget.measure import measure
from redivider.budget.planner import measure_step
from redivider.checks.memory import Live

WIDTH = 32


class Shift(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        inner = 2 * width
        self.body = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x, shift):
        return self.body(x) * shift


class Block(Shift):
    def forward(self, x, shift):
        return x + super().forward(x, shift)


class Network(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x, shift):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, shift)
        return self.head(x)


def chain(depth=3, **options):
    torch.manual_seed(0)
    units = [nn.Linear(WIDTH, WIDTH), rd.Duplicate()]
    units += [rd.Coupling(Shift(), takes=("shift",)) for _ in range(depth)]
    return rd.Chain([*units, rd.Fuse("add"), nn.Linear(WIDTH, 5)], **options)


def loss_of(y):
    return (y if isinstance(y, torch.Tensor) else y[0] * y[1]).square().sum()


def take(model, x, loss=loss_of, **side):
    """Return the peak of a step as a user runs it, without the gradients of weights."""
    model.zero_grad()
    with Live() as live:
        loss(model(x, **side)).backward()
        return live.peak_without([param.grad for param in model.parameters()])


def tensors(x_grad, shift_grad):
    x = torch.randn(64, WIDTH, requires_grad=x_grad)
    return x, torch.randn(64, WIDTH, requires_grad=shift_grad)


@pytest.mark.slow
@pytest.mark.parametrize("x_grad, shift_grad", [(False, True), (True, True)])
@pytest.mark.parametrize("kind", ["chain", "couplings", "frozen", "network"])
def test_gradients_of_the_input_and_of_keywords_count(kind, x_grad, shift_grad):
    x, shift = tensors(x_grad, shift_grad)
    model: Any = chain() if kind != "network" else rd.make_reversible(Network(), blocks="layers")
    inputs: Any = x
    if kind == "couplings":
        model, inputs = model[2:-2], (x, x.detach().clone().requires_grad_(x_grad))
    if kind == "frozen":
        model.requires_grad_(False)  # all of it
    least = smallest_budget(model, inputs, loss=loss_of, unit="", shift=shift)
    most = measure_step(model, "store", inputs, loss_of, shift=shift)
    for budget in (least, (least + most) // 2, most):
        plan = rd.plan(model, inputs, memory=budget, loss=loss_of, shift=shift)
        assert plan.measured <= plan.predicted
        plan.apply()
        x.grad = shift.grad = None
        assert take(model, inputs, shift=shift) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_a_step_that_checks_for_drift_stays_within_the_budget(arithmetic):
    """The first step does, and one in a hundred after it."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(nn.Linear(64, 64)) for _ in range(8)]
    for units in (couplings, [nn.Linear(64, 64), rd.Duplicate(), *couplings]):
        model = rd.Chain(units, arithmetic=arithmetic)
        x = torch.randn(16, 64)
        inputs = (x, x.clone()) if len(units) == 8 else x
        plan = rd.plan(model, inputs, memory=smallest_budget(model, inputs, unit="unit"))
        assert plan.measured <= plan.predicted and "reverse" in plan
        assert model._num_steps == 0 and model.check_every == 100
        plan.apply()
        checked, plain = (take(model, inputs, loss=sum_of) for _ in range(2))
        assert plain < checked <= plan.memory


def sum_of(y):
    return y[0].sum() + y[1].sum()


class By(nn.Module):
    """A function of its own."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def test_units_with_other_functions_are_measured_apart():
    """One saves a tensor that is as large as its input, the other six of them."""
    units = [By(torch.sin), By(lambda x: x.sin().sin().sin().exp().exp().exp())]
    model, x = rd.Chain([nn.Linear(8, 8), *units]), torch.randn(64, 8)
    problem = measure(model, x, {}, loss_of)
    first, second = (next(iter(own)).held for own in problem.units[1:3])
    assert second >= first + 4 * x.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_no_mix_takes_more_than_predicted(arithmetic):
    model = chain(arithmetic=arithmetic)
    x, shift = tensors(True, True)
    problem = measure(model, x, {"shift": shift}, loss_of)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        indices = [int(torch.randint(len(o), (), generator=generator)) for o in problem.units]
        names = choices_of(problem, indices)
        predicted = predict(problem, indices)
        measured = measure_step(model, names[:-1], x, loss_of, shift=shift)
        assert measured <= predicted <= 1.4 * measured, names


@pytest.mark.parametrize("choice", ["store", "checkpoint", "reverse"])
def test_casts_of_autocast_count_once(choice):
    """A unit that is stored would leave casts of its weights in autocast's cache."""
    model, (x, shift) = chain(6), tensors(False, False)
    with torch.autocast("cpu", torch.bfloat16):
        problem = measure(model, x, {"shift": shift}, loss_of)
        choices = [
            next((i for i, option in enumerate(own) if option.choice == choice), 0)
            for own in problem.units
        ]
        pairs = zip(problem.units[:-1], choices, strict=False)
        names = [own[number].choice for own, number in pairs]
        measured = measure_step(model, names, x, loss_of, shift=shift)
        predicted = predict(problem, choices)
    assert measured <= predicted <= 1.1 * measured
