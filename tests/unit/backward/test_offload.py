"""Inputs that wait on the host: gradients of checkpointing, and no race between the lanes."""

import copy

import pytest
import torch
from support.lanes import Races, Recorded
from support.networks import MLP, Attention
from support.oracle import gradients, weigh
from torch import nn

import redivider as rd
from redivider.backward.offload import NUM_LEAVING, Offload
from redivider.backward.overlap import MAIN, SIDE
from redivider.backward.strategy import Strategy


@pytest.fixture
def made(monkeypatch):
    """Make chains on the CPU offload as on a GPU; return what they made."""
    made = []

    def make(self, x):
        if not self.offloads:
            return None
        made.append(Offload(torch.device("cpu")))
        return made[-1]

    monkeypatch.setattr(Offload, "_make_lanes", lambda self: Recorded())
    monkeypatch.setattr(Strategy, "make_offload", make)
    return made


class Shift(nn.Module):
    takes = ("shift",)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, shift=None):
        return x + torch.tanh(self.inner(x)) * (1 if shift is None else shift)


def network(depth=6, **options):
    torch.manual_seed(0)
    makers = (lambda: Attention(8, 2, 0.2), lambda: MLP(8, 0.2))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(depth)]
    plain = [Shift() for _ in range(depth)]
    units = [nn.Linear(6, 8), *plain, rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units, backward="offload", **options).double()


def inputs(number=0):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 5, 6, generator=generator).double().requires_grad_()


def train(chain, *numbers, **side):
    torch.manual_seed(1)
    xs = [inputs(number) for number in numbers or (0,)]
    losses = [weigh(chain(x, **side)) for x in xs]
    for loss in reversed(losses):
        loss.backward()
    return [gradients(chain, x) for x in xs]


def equal(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.mark.parametrize("options", [{}, {"arithmetic": "fixed"}], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_gradients_are_those_of_checkpointing(made, depth, options):
    chain = network(depth, **options)
    other = copy.deepcopy(chain)
    other.backward = "checkpoint"
    shift = torch.rand(4, 1, 1).double()
    for _ in range(2):  # gradients add up
        assert equal(train(chain, 0, 1, shift=shift), train(other, 0, 1, shift=shift))
    assert len(made) == 4


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_no_lane_reads_too_early_or_takes_memory_that_the_other_one_uses(made, monkeypatch, depth):
    lanes = Recorded()
    monkeypatch.setattr(Offload, "_make_lanes", lambda self: lanes)
    chain = network(depth)
    for param in chain.parameters():
        param.register_hook(lambda grad: grad * 1)  # takes memory between two units
    races = Races(lanes)
    for _ in range(2):
        with races:
            weigh(chain(inputs())).backward()
    assert not races.found
    assert set(lanes.where.values()) == {MAIN, SIDE}


def test_only_the_last_inputs_stay_on_the_device(made):
    chain = network(8)
    loss = weigh(chain(inputs()))
    waiting, held = made[0]._last, []
    while waiting is not None:
        held.append(waiting.device is not None)
        waiting = waiting.before
    assert len(held) == len(chain)
    assert held == [True] * NUM_LEAVING + [False] * (len(chain) - NUM_LEAVING)
    loss.backward()
    waiting = made[0]._last
    while waiting is not None:
        assert waiting.device is None
        waiting = waiting.before


def test_inputs_come_back_one_unit_ahead(made, monkeypatch):
    chain, events = network(4), []
    bring, fetch = Offload._bring, Offload.fetch

    def noting(name, original):
        def run(self, waiting):
            events.append((name, waiting))
            return original(self, waiting)

        return run

    monkeypatch.setattr(Offload, "_bring", noting("bring", bring))
    monkeypatch.setattr(Offload, "fetch", noting("fetch", fetch))
    weigh(chain(inputs())).backward()
    fetched = [waiting for name, waiting in events if name == "fetch"]
    brought = [waiting for name, waiting in events if name == "bring"]
    assert brought == fetched[NUM_LEAVING:]
    for waiting in brought:
        # Two fetches earlier is one unit earlier: its own fetch has not come yet.
        assert events.index(("bring", waiting)) < events.index(("fetch", waiting))


def test_a_graph_can_be_used_twice(made):
    chain = network(3)
    other = copy.deepcopy(chain)
    other.backward = "checkpoint"
    for net in (chain, other):
        torch.manual_seed(1)
        loss = weigh(net(inputs()))
        loss.backward(retain_graph=True)
        loss.backward()
    assert equal([gradients(chain)], [gradients(other)])


def test_without_gradients_nothing_leaves(made):
    chain = network(3)
    with torch.no_grad():
        chain(inputs())
    assert not made


def test_on_the_cpu_it_is_checkpointing():
    chain = network(3)
    other = copy.deepcopy(chain)
    other.backward = "checkpoint"
    assert equal(train(chain), train(other))
