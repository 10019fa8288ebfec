"""Plans for blocks of a network: what is measured, saved and refused."""

import copy
from typing import Any

import pytest
import torch
from support.budgets import smallest_budget
from torch import nn

import redivider as rd
from redivider.budget import blocks as measuring
from redivider.budget.blocks import measure_blocks
from redivider.budget.planner import cheapest, cost_of, measure_step
from redivider.budget.problem import find_least
from redivider.budget.solve import solve
from redivider.budget.unit import measure_part
from redivider.convert.reversible import blocks_of, set_strategies, strategies_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return x + self.body(x)


class Network(nn.Module):
    num_runs = 1

    def __init__(self, depth=4):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            for _ in range(self.num_runs):
                x = layer(x)
        return self.head(x)


def make(depth=4) -> Any:
    torch.manual_seed(0)
    return rd.make_reversible(Network(depth), blocks="layers"), torch.randn(64, 6)


def loss_of(y):
    return y.square().sum()


@pytest.mark.parametrize("depth, message", [(5, "it has no 'layers.4'"), (3, "'layers.3', and")])
def test_a_network_of_another_depth_is_refused_as_a_whole(depth, message):
    model, x = make()
    plan = rd.plan(model, x, memory="1GiB", loss=loss_of)
    other, _ = make(depth)
    with pytest.raises(ValueError, match=f"the plan is of another model: .*{message}"):
        plan.apply(other)
    assert {*strategies_of(other).values()} == {"compress"}


def test_a_choice_that_blocks_do_not_have_is_refused(tmp_path):
    model, x = make()
    rd.plan(model, x, memory="1GiB", loss=loss_of).save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"store"', '"reverse"', 1))
    with pytest.raises(ValueError, match=r"'layers\.0' has no choice 'reverse': store, checkpoint"):
        rd.Plan.load(tmp_path / "plan.json").apply(model)
    assert {*strategies_of(model).values()} == {"compress"}


def least_of(model, x):
    return find_least(measure_blocks(model, x, {}, loss_of)[1])


def test_it_is_printed_saved_and_loaded(tmp_path):
    model, x = make()
    most = measure_step(model, "store", x, loss_of)
    plan = rd.plan(model, x, memory=(least_of(model, x) + most) // 2, loss=loss_of)
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [f"layers.{index}" for index in range(4)]
    plan.save(tmp_path / "plan.json")
    other, _ = make()
    assert rd.Plan.load(tmp_path / "plan.json").apply(other) is other
    assert [*strategies_of(other).values()] == [*plan] and len({*plan}) > 1
    with pytest.raises(ValueError, match="backward"):
        set_strategies(model, "stores")


def test_a_block_that_was_frozen_when_the_plan_was_made_does_not_train_by_it():
    model, x = make()
    for module in (model.stem, model.layers[0]):
        module.requires_grad_(False)
    plan = rd.plan(model, x, memory="1GiB", loss=loss_of)
    assert len(plan) == 3 and {*strategies_of(model).values()} == {"compress"}
    plan.apply()
    loss_of(model(x)).backward()
    before = copy.deepcopy(model)
    model.layers[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"no choice for layers\.0.*rd\.plan"):
        model(x)
    assert torch.equal(model.eval()(x), before.eval()(x))
    again = rd.plan(model.train(), x, memory="1GiB", loss=loss_of)
    assert len(again) == 4
    again.apply()
    loss_of(model(x)).backward()


def test_a_budget_too_small_says_what_is_needed():
    model, x = make()
    least = smallest_budget(model, x, loss=loss_of, unit=r"layers\.\d")
    plan = rd.plan(model, x, memory=least, loss=loss_of)
    assert plan.measured == least <= least_of(model, x) and "compress" in plan
    with pytest.raises(ValueError, match="no plan fits"):
        rd.plan(model, x, memory=least - 1, loss=loss_of)


def test_all_of_the_memory_means_store():
    model, x = make()
    plan = rd.plan(model, x)
    assert {*plan} == {"store"} and plan.cost == 0


@pytest.mark.slow
def test_blocks_are_compressed_only_where_that_is_faster():
    model, x = make()
    problem = measure_blocks(model, x, {}, loss_of)[1]
    exact = problem.without("compress")
    seen = set()
    for budget in range(find_least(problem), 2 * find_least(exact), 500):
        choices, others = cheapest(problem, budget), solve(exact, budget)
        assert choices is not None
        cost = cost_of(problem, choices)
        assert cost == cost_of(problem, solve(problem, budget) or [])
        is_exact = cost_of(exact, others) == cost if others else False
        options = [own[choice].choice for own, choice in zip(problem.units, choices, strict=True)]
        assert ("compress" in options) == (not is_exact)
        seen.add(is_exact)
    assert seen == {True, False}


def test_equal_blocks_are_measured_once(monkeypatch):
    measured = []

    def count(part, x, needs, timer):
        measured.append(part.module.wrapped)
        return measure_part(part, x, needs, timer)

    monkeypatch.setattr(measuring, "measure_part", count)
    model, x = make()
    measure_blocks(model, x, {}, loss_of)
    assert measured == [model.layers[0]]
    measured.clear()
    model.layers[2].body[0].requires_grad_(False)
    measure_blocks(model, x, {}, loss_of)
    assert measured == [model.layers[0], model.layers[2]]


def test_networks_that_have_no_plan():
    model, x = make()
    model.num_runs = 2
    with pytest.raises(ValueError, match=r"layers\.0 runs twice in a forward"):
        rd.plan(model, x, memory="1GiB")
    model, x = make()
    with pytest.raises(ValueError, match=r"call model\.train\(\)"):
        rd.plan(model.eval(), x, memory="1GiB")
    model, x = make()
    with pytest.raises(ValueError, match=r"call model\.train\(\)|no gradient"):
        rd.plan(model.requires_grad_(False), x, memory="1GiB")
    assert all(blocks.observe is None for blocks, _ in blocks_of(model).values())
