"""Plans keep their budgets: a real step takes no more bytes than allowed, and more save work."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budgets import choices_of, numbers_of, predict
from support.networks import Marked
from torch import nn

import redivider as rd
from redivider.budget.measure import measure
from redivider.budget.planner import measure_step
from redivider.budget.problem import find_least
from redivider.budget.solve import solve
from redivider.checks.flops import counting_flops

NUM_BUDGETS = 30


def vit(**options):
    sizes: Any = {"depth": 6, "width": 32, "heads": 2, "patch_size": 8, "image_size": 32}
    model = rd.create_model("rev_vit_small", num_classes=10, **sizes, **options)
    return model, torch.randn(2, 3, 32, 32)


def gpt(**options):
    sizes: Any = {"depth": 5, "width": 32, "heads": 2, "context": 16}
    model = rd.create_model("rev_gpt_small", vocabulary=100, **sizes, **options)
    return model, torch.randint(100, (2, 16))


def swin(**options):
    sizes: Any = {"depths": (3, 2), "width": 16, "heads": 2, "window": 2, "image_size": 16}
    model = rd.create_model("rev_swin_tiny", num_classes=10, **sizes, **options)
    return model, torch.randn(2, 3, 16, 16)


def revnet(**options):
    model = rd.create_model("revnet50", num_classes=10, image_size=32, width=8, **options)
    return model, torch.randn(2, 3, 8, 8)


def loss_of(y):
    """Return a loss that keeps a graph of its own."""
    return F.cross_entropy(y.flatten(0, -2), torch.zeros(y[..., 0].numel(), dtype=torch.long))


def run(model, backward, x):
    """Return the peak in bytes and the FLOPs of a step."""
    peak = measure_step(model, backward, x, loss_of)
    with counting_flops() as counter:  # which keeps tensors alive
        measure_step(model, backward, x, loss_of)
    return peak, counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [vit, gpt, swin, revnet])
def test_thirty_budgets(make):
    """No step exceeds its budget, and a larger budget never means more FLOPs."""
    torch.manual_seed(0)
    model, x = make()
    problem = measure(model, x, {}, loss_of)
    least = find_least(problem)
    most, work = run(model, "store", x)
    assert least < most / 2
    peaks: dict[tuple[str, ...], int] = {}
    flops = []
    for step in range(NUM_BUDGETS):
        budget = least + step * (most - least) // (NUM_BUDGETS - 1)
        numbers = solve(problem, budget)
        assert numbers is not None
        plan = tuple(choices_of(problem, numbers)[:-1])
        if plan not in peaks:
            peaks[plan] = measure_step(model, plan, x, loss_of)
        assert peaks[plan] <= budget
        pairs = zip(problem.units, numbers, strict=True)
        flops.append(work + sum(own[choice].cost for own, choice in pairs))
        if step % 10 == 0:  # costs are the FLOPs of real steps
            assert flops[-1] == run(model, plan, x)[1]
    offered = {option.choice for own in problem.units for option in own}
    assert ("save" in offered) == (make in (vit, gpt))  # with a bias the CPU fuses no attention
    assert all(more <= less for less, more in pairwise(flops))
    assert flops[0] > flops[-1] == work


def test_plans_save_attention_where_it_is_most_of_the_work():
    """Many tokens of small width: between `reverse` and `store`, "save" is the cheapest."""
    torch.manual_seed(0)
    sizes: Any = {"depth": 3, "width": 16, "heads": 1, "patch_size": 2, "image_size": 32}
    model = rd.create_model("rev_vit_small", num_classes=10, **sizes)
    x = torch.randn(1, 3, 32, 32)
    problem = measure(model, x, {}, loss_of)
    least, (most, work) = find_least(problem), run(model, "store", x)
    numbers = solve(problem, least + (most - least) // 4)
    assert numbers is not None
    plan = choices_of(problem, numbers)
    assert plan.count("save") >= 2
    costs = (own[choice].cost for own, choice in zip(problem.units, numbers, strict=True))
    peak, flops = run(model, plan[:-1], x)
    assert peak <= least + (most - least) // 4 and flops == work + sum(costs)


def small(arithmetic, dropout):
    """Return a chain of all kinds of units, in which neighbours share tensors."""
    torch.manual_seed(0)

    def f(width):
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )

    def plain(width):
        return nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    units = [
        nn.Sequential(nn.Linear(6, 64), nn.ReLU()),
        rd.Duplicate(),
        rd.Coupling(Marked(64, dropout)),
        rd.Coupling(plain(64)),
        rd.Coupling(f(64)),
        rd.Coupling(Marked(64, dropout)),
        rd.Coupling(Marked(64, dropout)),
        rd.Fuse("concat"),
        nn.Sequential(nn.Linear(128, 64), nn.ReLU()),
        Marked(64, dropout),
        nn.Dropout(dropout),
        rd.Split(),
        rd.Coupling(f(32)),
        rd.Coupling(plain(32)),
        rd.Coupling(f(32)),
        rd.Fuse("add"),
        nn.Linear(32, 10),
    ]  # fmt: skip
    return rd.Chain(units, arithmetic=arithmetic), torch.randn(128, 6)


PROBLEMS: dict = {}


@pytest.mark.slow
@settings(deadline=None)
@given(st.sampled_from(["float", "fixed"]), st.sampled_from([0.0, 0.5]), st.data())
def test_no_plan_takes_more_than_predicted(arithmetic, dropout, data):
    """Whatever the choices, a real step stays within the prediction, and not far below it."""
    if (arithmetic, dropout) not in PROBLEMS:
        model, x = small(arithmetic, dropout)
        PROBLEMS[arithmetic, dropout] = model, x, measure(model, x, {}, loss_of)
    model, x, problem = PROBLEMS[arithmetic, dropout]
    numbers = [data.draw(st.integers(0, len(own) - 1)) for own in problem.units]
    names = choices_of(problem, numbers)
    predicted = predict(problem, numbers)
    measured = measure_step(model, names[:-1], x, loss_of)
    assert measured <= predicted
    assert predicted <= 1.35 * measured


def streams(kind):
    """Return a chain that ends in streams, with couplings of one size or of several, or marked."""
    torch.manual_seed(0)
    sizes = [nn.Linear(16, 16) for _ in range(5)]
    functions = {
        "equal": sizes,
        "unequal": [wide(2), wide(16), *sizes[:2], nn.Tanh()],
        "marked": [Marked(16, 0.0), nn.Tanh(), Marked(16, 0.0), wide(2), Marked(16, 0.0)],
    }[kind]
    stem = nn.Linear(16, 16) if kind == "equal" else wide(6)
    model = rd.Chain([stem, rd.Duplicate(), *map(rd.Coupling, functions)], check_every=0)
    return model, torch.randn(32, 16)


def wide(factor):
    return nn.Sequential(nn.Linear(16, 16 * factor), nn.GELU(), nn.Linear(16 * factor, 16))


def sum_of_streams(y):
    """Return a loss that reads both streams, whose gradients come one after the other."""
    return y[0].square().sum() + y[1].square().sum()


def test_a_coupling_that_saves_below_a_reversed_one_is_predicted_closely():
    """It rebuilds its input, so nobody else holds that."""
    torch.manual_seed(0)
    functions = (nn.Tanh(), Marked(16, 0.0), nn.Linear(16, 16))
    model = rd.Chain([nn.Linear(16, 16), rd.Duplicate(), *map(rd.Coupling, functions)])
    x = torch.randn(64, 16)
    problem = measure(model, x, {}, sum_of_streams)
    names = ["store", "store", "reverse", "save", "reverse", "store"]
    predicted = predict(problem, numbers_of(problem, names))
    measured = measure_step(model, names[:-1], x, sum_of_streams)
    assert measured <= predicted <= 1.02 * measured


@settings(deadline=None)
@given(st.sampled_from(["equal", "unequal", "marked"]), st.data())
def test_no_plan_of_streams_takes_more_than_predicted(kind, data):
    """Neighbours keep the same tensor, and one of them may release it early."""
    if kind not in PROBLEMS:
        model, x = streams(kind)
        PROBLEMS[kind] = model, x, measure(model, x, {}, sum_of_streams)
    model, x, problem = PROBLEMS[kind]
    numbers = [data.draw(st.integers(0, len(own) - 1)) for own in problem.units]
    names = choices_of(problem, numbers)
    predicted = predict(problem, numbers)
    measured = measure_step(model, names[:-1], x, sum_of_streams)
    assert measured <= predicted <= 1.35 * measured


class KeepsItself(torch.autograd.Function):
    """A cosine, whose node holds a tensor until the whole graph is freed."""

    @staticmethod
    def forward(ctx, x):
        ctx.sine = x.sin()
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        return -grad * ctx.sine


class Cosine(nn.Module):
    def forward(self, x):
        return KeepsItself.apply(x)


def halves(*couplings):
    """Return a chain whose upper end gives two halves of one gradient."""
    units = [nn.Linear(16, 16), rd.Duplicate(), *map(rd.Coupling, couplings), rd.Fuse("concat")]
    return rd.Chain(units, check_every=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: halves(wide(2), nn.Tanh()),
        lambda: halves(nn.Tanh(), wide(2)),
        lambda: halves(nn.Tanh(), wide(2), nn.Tanh()),
        lambda: rd.Chain([wide(8), Cosine()]),
        lambda: rd.Chain([wide(8), nn.Linear(16, 16), Cosine(), Cosine()]),
    ],
)
def test_memory_that_a_unit_above_still_holds_counts(make):
    """The other half of a gradient, and what is freed with the graph alone."""
    torch.manual_seed(0)
    model, x, factors = make(), torch.randn(64, 16), torch.randn(64, 32)

    def loss(y):
        return (y * factors[:, : y.shape[1]]).sum()

    problem = measure(model, x, {}, loss)
    for numbers in product(*(range(len(own)) for own in problem.units)):
        names = choices_of(problem, numbers)
        predicted = predict(problem, numbers)
        measured = measure_step(model, names[:-1], x, loss)
        assert measured <= predicted <= 1.35 * measured, names


@pytest.mark.parametrize("choice", ["store", "checkpoint"])
def test_equal_units_of_which_one_gives_its_input_no_gradient(choice):
    """They are measured apart."""
    torch.manual_seed(0)
    model = rd.Chain([nn.Linear(64, 64) for _ in range(4)])
    model[0].requires_grad_(False)
    x, factors = torch.randn(256, 64), torch.randn(256, 64)

    def loss(y):
        return (y * factors).sum()

    problem = measure(model, x, {}, loss)
    predicted = predict(problem, numbers_of(problem, [*[choice] * 4, "store"]))
    assert measure_step(model, choice, x, loss) <= predicted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "unequal"])
def test_thirty_budgets_of_streams(kind):
    """Plans themselves, with the real step that checks them."""
    model, x = streams(kind)
    least = find_least(measure(model, x, {}, sum_of_streams))
    most = measure_step(model, "store", x, sum_of_streams)
    costs = []
    for step in range(NUM_BUDGETS):
        budget = least + step * (most - least) // (NUM_BUDGETS - 1)
        plan = rd.plan(model, x, memory=budget, loss=sum_of_streams)
        assert plan.measured <= plan.predicted <= budget and not plan.note
        costs.append(plan.cost)
    assert all(more <= less for less, more in pairwise(costs)) and costs[0] > costs[-1]


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_a_plan_that_was_applied_trains_as_store_does(arithmetic):
    model, x = small(arithmetic, 0.5)
    model.double()
    x = x.double()
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model.backward = "store"
    least = find_least(measure(model, x, {}, loss_of))
    plan = rd.plan(model, x, memory=least * 5 // 4, loss=loss_of)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(set(plan)) >= 2
    names = [name for name, _ in model.named_parameters()]
    grads = {}
    for backward in ("store", plan.choices):
        model.backward = backward
        torch.manual_seed(1)
        loss_of(model(x)).backward()
        grads[backward] = [param.grad for param in model.parameters()]
        model.zero_grad()
    assert plan.apply() is model
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    for grad, true in zip(grads[plan.choices], grads["store"], strict=True):
        if arithmetic == "fixed":
            assert torch.equal(grad, true)
        else:
            assert (grad - true).norm() <= 1e-12 * true.norm().clamp(min=1)
