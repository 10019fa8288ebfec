"""The partition of units into stages: even, deterministic, and logged."""

import logging
from collections import OrderedDict
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.networks import MLP, vector_chain
from torch import nn

import redivider as rd
from redivider.pipeline.partition import balance_of, count_costs, cut_evenly, loads_of


def SGD(stage):
    return torch.optim.SGD(stage.parameters(), lr=0.1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_cut_is_more_even(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    sizes = cut_evenly(costs, stages)
    assert len(sizes) == stages and sum(sizes) == len(costs) and min(sizes) >= 1

    def largest(sizes):
        ends = list(accumulate(sizes))
        return max(sum(costs[e - s : e]) for s, e in zip(sizes, ends, strict=True))

    every = [
        [b - a for a, b in zip((0, *edges), (*edges, len(costs)), strict=True)]
        for edges in combinations(range(1, len(costs)), stages - 1)
    ]
    assert largest(sizes) == min(map(largest, every))
    assert sizes == cut_evenly(list(costs), stages)


def test_a_number_of_stages_is_balanced_by_units_or_by_work():
    torch.manual_seed(0)
    wide, narrow = nn.Linear(64, 64), nn.Linear(4, 4)
    model = [nn.Linear(4, 4), narrow, nn.Linear(4, 64), wide, nn.Linear(64, 64), nn.Linear(64, 3)]
    options: dict[str, Any] = {"stages": 3, "loss": F.cross_entropy, "optimizer": SGD}
    assert rd.Pipeline(model, **options).cut == [2, 2, 2]
    pipe = rd.Pipeline(model, **options, example=torch.randn(2, 4))
    assert pipe.cut == [3, 1, 2]
    assert rd.balance(model, 3, example=torch.randn(2, 4)) == [3, 1, 2]
    assert rd.balance(model, 3, by="units") == [2, 2, 2]
    assert sum(rd.balance(model, 3, by="time", example=torch.randn(2, 4))) == 6
    assert count_costs(model, "work", torch.randn(2, 4))[3] == 2 * 2 * 64 * 64


def test_work_is_the_same_on_meta_and_on_the_cpu():
    """Processes cut on meta, one process on its device; torch omits the CPU's attention."""
    options: dict[str, Any] = {"num_classes": 10, "image_size": 32}
    costs, cuts = [], []
    for device in ("cpu", "meta"):
        model = rd.create_model("rev_vit_tiny", device=device, **options)
        x = torch.randn(2, 3, 32, 32, device=device)
        costs.append(count_costs(model, "work", x))
        cuts.append(rd.balance(model, 5, example=x))
    assert costs[0] == costs[1] and cuts[0] == cuts[1]


def test_counting_work_leaves_the_model_as_it_was():
    model = rd.Chain(
        [
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            rd.Duplicate(),
            rd.Coupling(MLP(8)),
            rd.Fuse(),
        ]
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = torch.randn(4, 6)
    state = torch.get_rng_state()
    for by in ("work", "time"):
        rd.balance(model, 3, by=by, example=example)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_the_cut_is_told_with_its_balance_and_can_be_pinned(caplog):
    model = vector_chain(depth=4)
    with caplog.at_level(logging.INFO, "redivider"):
        pipe = rd.Pipeline(model, stages=3, loss=F.cross_entropy, optimizer=SGD)
    assert "stages=[3, 3, 2], balance 2.67 of 3" in caplog.text
    again = rd.Pipeline(vector_chain(depth=4), stages=pipe.cut, loss=F.cross_entropy, optimizer=SGD)
    assert again.cut == pipe.cut
    assert (
        rd.Pipeline(vector_chain(depth=4), stages="auto", loss=F.cross_entropy, optimizer=SGD).cut
        == [1] * 8
    )
    assert balance_of(loads_of([1, 1, 2], [2, 1])) == 2.0


def test_bad_cuts_are_refused():
    model = vector_chain(depth=1)
    cuts: list[tuple[Any, str]] = [
        (6, "5 units cannot be cut into 6 stages"),
        (0, "cannot be cut into 0 stages"),
        ([2, 2], r"\[2, 2\], must be at least 1 and add up to the number of units, 5"),
        ([5, 0], "must be at least 1"),
        ("even", 'a list of sizes or "auto"'),
    ]
    for stages, message in cuts:
        with pytest.raises(ValueError, match=message):
            rd.Pipeline(model, stages=stages, loss=F.cross_entropy, optimizer=SGD)
    with pytest.raises(ValueError, match="needs an example"):
        rd.balance(model, 2, by="time")
    with pytest.raises(ValueError, match="'units', 'work', 'time', got 'memory'"):
        rd.balance(model, 2, by="memory")
    with pytest.raises(TypeError, match=r"Linear has no units\(\)"):
        rd.balance(nn.Linear(2, 2), 1)


class Named(nn.Module):
    """A model that is no chain, with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 4)
        self.body = nn.ModuleDict({"pair": rd.Split(), "one": rd.Coupling(MLP(2))})
        self.fuse, self.head = rd.Fuse(), nn.Linear(4, 3)

    def units(self):
        return [self.stem, *self.body.values(), self.fuse, self.head]


def test_stages_have_the_names_of_the_uncut_model():
    model = Named()
    names: list[str] = []
    groups = []

    def optimizer(stage):
        names.extend(name for name, _ in stage.named_parameters())
        groups.append([type(module).__name__ for module in stage.modules()])
        return SGD(stage)

    rd.Pipeline(model, stages=3, loss=F.cross_entropy, optimizer=optimizer)
    assert names == [name for name, _ in model.named_parameters()]
    assert len(groups) == 3


def test_shared_parameters_and_units_are_refused():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    with pytest.raises(ValueError, match=r"'2.weight' of stage 1 is also '0.weight' of stage 0"):
        rd.Pipeline([a, nn.ReLU(), b], stages=[2, 1], loss=F.mse_loss, optimizer=SGD)
    rd.Pipeline([a, nn.ReLU(), b], stages=1, loss=F.mse_loss, optimizer=SGD)
    with pytest.raises(ValueError, match="occurs twice"):
        rd.Pipeline([a, a], stages=2, loss=F.mse_loss, optimizer=SGD)
    with pytest.raises(ValueError, match="occurs twice"):
        rd.Pipeline(nn.Sequential(a, a), stages=2, loss=F.mse_loss, optimizer=SGD)


def test_a_sequential_is_a_list_of_units_by_its_names():
    def train(units):
        torch.manual_seed(0)
        for layer in (layer for layer in units if isinstance(layer, nn.Linear)):
            layer.reset_parameters()
        pipe = rd.Pipeline(units, stages=2, loss=F.mse_loss, optimizer=SGD)
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            pipe.step(*torch.randn(2, 3, 4, generator=generator))
        pipe.flush()
        return {key: value.clone() for key, value in pipe.full_state_dict().items()}

    layers = {"first": nn.Linear(4, 4), "act": nn.Tanh(), "last": nn.Linear(4, 4)}
    states = [train(nn.Sequential(OrderedDict(layers))), train([*layers.values()])]
    assert list(states[0]) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(one, other)
