"""Weights cast once per update: the numbers of autocast, without its casts."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, ConvNorm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import redivider as rd
from redivider.pipeline.stages.casts import Casts, watching
from redivider.pipeline.stages.weights import Weights


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def network():
    torch.manual_seed(0)
    couplings = [rd.Coupling(ConvNorm(4)) for _ in range(3)]
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), rd.Split(dim=1))
    return rd.Chain([stem, *couplings, rd.Fuse("concat", dim=1), Pooled(), nn.Linear(8, 3)])


def build(model, **options):
    return rd.Pipeline(
        model,
        stages="auto",
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9),
        seed=0,
        **options,
    )


def run(pipe, number, start=0, dtype=torch.bfloat16):
    losses = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, 3, 6, 6, generator=generator)
        target = torch.randint(3, (4,), generator=generator)
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            tick = pipe.step(x, target)
        losses += [] if tick.loss is None else [tick.loss]
    return torch.stack(losses)


def uncast(monkeypatch):
    monkeypatch.setattr(Weights, "learn_casts", lambda *_: None)


def equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


class CastsOf(TorchDispatchMode):
    """Counts how often tensors of these shapes are cast."""

    def __init__(self, tensors):
        super().__init__()
        self.shapes, self.count = {tensor.shape for tensor in tensors}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["petra", "dsp", "delayed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_numbers_are_those_of_autocast(method, accumulate, monkeypatch):
    ours, theirs = network(), network()
    pipe = build(ours, method=method, accumulate=accumulate)
    losses = run(pipe, 40)
    uncast(monkeypatch)
    plain = build(theirs, method=method, accumulate=accumulate)
    assert torch.equal(losses, run(plain, 40))
    assert equal(ours, theirs)
    states = pipe.state_dict()["units"], plain.state_dict()["units"]
    for name, unit in states[0].items():
        for key, grad in unit["gradients"].items():
            assert grad.dtype == torch.float32
            assert torch.equal(grad, states[1][name]["gradients"][key])


def test_a_tick_casts_no_weight():
    model = network()
    pipe = build(model)
    weights = [param for param in model.parameters() if param.dim() > 1]
    run(pipe, 20)
    with CastsOf(weights) as casts:
        run(pipe, 5, start=20)
    assert casts.count == 0
    cast = [set(unit.weights.casts[torch.bfloat16].copies) for unit in pipe._units.values()]
    norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    assert set.union(*cast) == set(model.parameters()) - norms


@pytest.mark.slow
def test_weights_changed_by_others_are_cast_again(monkeypatch):
    def change(model):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)

    models = [network(), network()]
    losses = []
    for model in models:
        pipe = build(model, accumulate=4)
        losses.append([run(pipe, 21)])
        change(model)
        losses[-1].append(run(pipe, 10, start=21))
        uncast(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


@pytest.mark.slow
def test_other_precisions_and_none(monkeypatch):
    models = [network(), network()]
    losses = []
    for model in models:
        pipe = build(model)
        losses.append([run(pipe, 15), run(pipe, 15, start=15, dtype=None)])
        losses[-1].append(run(pipe, 15, start=30, dtype=torch.float16))
        uncast(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert equal(*models)


class Odd(nn.Module):
    """Uses a weight as it is, beside a product that casts it; and one only under a product."""

    def __init__(self):
        super().__init__()
        self.both, self.product, self.never = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.view = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = x.float() @ self.view
        return F.linear(x, self.both) + self.both.sum() + F.linear(x, self.product) + y


def test_only_what_is_always_cast_gets_a_copy():
    module = Odd()
    weights = list(module.parameters())
    with torch.autocast("cpu", torch.bfloat16), watching(weights, torch.bfloat16) as cast:
        module(torch.randn(2, 4))
    assert [param is module.product for param in cast] == [True]


class Tied(nn.Module):
    def __init__(self, linear, times=1):
        super().__init__()
        self.linear, self.times = linear, times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


@pytest.mark.parametrize("times", [1, 3])
def test_weights_that_are_used_more_than_once(times, monkeypatch):
    """By two units of a stage, or several times by one: gradients add up in full precision."""
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        linear = nn.Linear(8, 8)
        units = [nn.Linear(3, 8), Tied(linear, times), Tied(linear, times), nn.Linear(8, 3)]
        pipe = rd.Pipeline(
            rd.Chain(units),
            stages=[1, 2, 1],
            loss=F.cross_entropy,
            optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.5),
        )
        for index in range(20):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(4, 3, generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                pipe.step(x, torch.randint(3, (4,), generator=generator))
        weights.append(linear.weight.detach())
        uncast(monkeypatch)
    assert torch.equal(*weights)


def test_weights_that_share_their_memory_get_none():
    whole = torch.randn(8, 4)
    one, other = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    with torch.autocast("cpu", torch.bfloat16), watching([one, other], torch.bfloat16) as cast:
        F.linear(F.linear(torch.randn(2, 4), one), other)
    assert cast == []


def test_copies_keep_their_strides():
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    copy = Casts([weight], torch.bfloat16).copies[weight]
    assert copy.stride() == weight.stride()
    assert torch.equal(copy, weight.bfloat16())


@pytest.mark.slow
def test_look_ahead_goes_without(monkeypatch):
    models = [network(), network()]
    losses = []
    for model in models:
        losses.append(run(build(model, lookahead=True), 30))
        uncast(monkeypatch)
    assert torch.equal(*losses)


def test_dropout_is_drawn_as_before(monkeypatch):
    """The run that is watched leaves no trace."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        units = [nn.Linear(3, 8), rd.Duplicate(), rd.Coupling(MLP(8, dropout=0.5)), rd.Fuse()]
        pipe = build(rd.Chain([*units, nn.Flatten(), nn.Linear(16, 3)]))
        losses = []
        for index in range(20):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(4, 3, generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                tick = pipe.step(x, torch.randint(3, (4,), generator=generator))
            losses += [] if tick.loss is None else [tick.loss]
        runs.append(torch.stack(losses))
        uncast(monkeypatch)
    assert torch.equal(*runs)
