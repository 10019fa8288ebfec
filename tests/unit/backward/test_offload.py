"""Inputs that wait on the host: gradients of checkpointing, and no race between the lanes."""

import copy
from collections import deque
from weakref import ref

import pytest
import torch
from support.lanes import Races, Recorded
from support.networks import MLP, Attention
from support.oracle import gradients, weigh, worst_error
from torch import nn

import redivider as rd
from redivider.backward.offload import NUM_LEAVING, Offload
from redivider.backward.overlap import MAIN, SIDE
from redivider.backward.strategy import Strategy
from redivider.checks.flops import counting_flops


@pytest.fixture
def made(monkeypatch):
    """Make chains on the CPU offload as on a GPU; return what they made."""
    made = []
    make_other = Strategy.make_keeper

    def make(self, x):
        if not self.offloads:
            return make_other(self, x)
        made.append(Offload(torch.device("cpu")))
        return made[-1]

    monkeypatch.setattr(Offload, "_make_lanes", lambda self: Recorded())
    monkeypatch.setattr(Strategy, "make_keeper", make)
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


class SavingMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs: list[torch.Tensor] = []

    def forward(self, a):
        hidden = rd.save(self.up(a))
        self.runs.append(hidden.detach())
        return self.down(torch.tanh(hidden))


def test_saved_operations_wait_on_the_host_as_well(made):
    bodies = [SavingMLP() for _ in range(5)]
    couplings = map(rd.Coupling, bodies)
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse("add"), nn.Linear(8, 3)]
    chain = rd.Chain(units, backward="offload-save").double()
    other = copy.deepcopy(chain)
    other.backward = "checkpoint"
    for _ in range(2):
        grads, true = train(chain, 0, 1), train(other, 0, 1)
        assert all(worst_error(*pair) <= 1e-12 for pair in zip(grads, true, strict=True))
    for body in bodies:
        body.runs.clear()
    loss = weigh(chain(inputs()))
    waiting = all_waiting(made[-1])[::-1][2:7]  # of the couplings
    saved = [body.runs[0] for body in bodies]
    for own, output in zip(waiting, saved, strict=True):
        assert [tensor.shape[-1] for tensor in own.host] == [8, 16]
        assert torch.equal(own.host[1].view_as(output), output)
    alive = [ref(output.untyped_storage()) for output in saved]
    del saved, output
    for body in bodies:
        body.runs.clear()
    assert [own() is None for own in alive] == [True] * 5, "two units above are still leaving"
    loss.backward()


@pytest.mark.parametrize(
    "depth", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 6))]
)
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


def all_waiting(offload):
    """Return the inputs of all units, the last unit first."""
    waiting, found = offload._last(), []
    while waiting is not None:
        found.append(waiting)
        waiting = waiting.before
    return found


def test_only_the_last_inputs_stay_on_the_device(made):
    chain = network(8)
    loss = weigh(chain(inputs()))
    waiting = all_waiting(made[0])
    assert [w.device is not None for w in waiting] == [
        index < NUM_LEAVING for index in range(len(chain))
    ]
    assert all(w.host is not None for w in waiting)
    loss.backward()  # and then nothing is held, though the loss lives
    assert all(w.device is None and w.host is None for w in waiting)


@pytest.mark.parametrize("above", ["checkpoint", "store", "compress"])
def test_nothing_stays_on_the_device_below_units_that_keep_something_else(made, above):
    chain = network(2)
    chain.backward = "store"
    other = copy.deepcopy(chain)
    chain.backward = ["offload"] * 3 + ["offload-save"] * 2 + [above] * 3
    loss = weigh(chain(inputs()))
    (offload,) = made  # both strategies share it
    waiting = all_waiting(offload)
    assert len(waiting) == 5 and all(own.device is None for own in waiting)
    loss.backward()
    chain.zero_grad()
    if above != "compress":
        assert worst_error(train(chain)[0], train(other)[0]) <= 1e-12


def test_nothing_comes_back_before_other_units_have_run(made, monkeypatch):
    sent = []
    push = Offload.push

    def note(self, tensors):
        sent.append(push(self, tensors))
        return sent[-1]

    monkeypatch.setattr(Offload, "push", note)
    torch.manual_seed(0)
    units = [Shift().double() for _ in range(9)]
    chain = rd.Chain(units, backward=["offload"] * 3 + ["checkpoint"] * 3 + ["offload"] * 3)
    loss = chain(torch.randn(2, 8, dtype=torch.float64)).sum()
    assert len(made) == 1 and len(sent) == 6
    places = []
    for unit in units:
        unit.inner.weight.register_hook(
            lambda _: places.append([own.device is not None for own in sent[:3]])
        )
    loss.backward()
    nothing, ahead = [False] * 3, [False, True, False]
    assert places == [nothing] * 6 + [ahead, [True, False, False], nothing]


def test_units_without_a_backward_send_nothing(made):
    chain = network(4)
    chain[:5].requires_grad_(False)
    x = inputs().detach()
    loss = weigh(chain(x))
    assert len(all_waiting(made[0])) == len(chain) - 6  # nor does Duplicate, after those
    loss.backward()
    assert all(param.grad is not None for param in chain[5:].parameters())


def test_what_was_brought_back_in_vain_is_released(made):
    chain = network(4)
    loss = weigh(chain(inputs()))
    torch.autograd.grad(loss, [*chain[-1].parameters()])
    waiting = all_waiting(made[0])
    assert all(w.device is None for w in waiting[NUM_LEAVING:])


def test_several_chains_share_the_place_on_the_device(made, monkeypatch):
    shared: deque = deque()
    monkeypatch.setattr(Offload, "_get_leaving", lambda self: shared)
    chains = [rd.Chain([nn.Linear(6, 6)], backward="offload").double() for _ in range(5)]
    x = inputs()
    other = copy.deepcopy(chains)
    for chain in chains:
        x = chain(x)
    on_device = [w.device is not None for offload in made for w in all_waiting(offload)]
    assert sum(on_device) == NUM_LEAVING
    weigh(x).backward()
    y = inputs()
    for chain in other:
        chain.backward = "checkpoint"
        y = chain(y)
    weigh(y).backward()
    for one, two in zip(chains, other, strict=True):
        assert equal([gradients(one)], [gradients(two)])


def test_an_input_that_changed_is_noticed(made):
    chain, x = rd.Chain([nn.Linear(4, 4)], backward="offload"), torch.randn(3, 4)
    loss = chain(x).sum()
    x.mul_(2)
    with pytest.raises(rd.ChangedError, match="its input changed"):
        loss.backward()


class Marked(torch.Tensor):
    """A tensor that is more than its numbers."""


@pytest.mark.usefixtures("made")
def test_other_tensors_stay_where_they_are():
    offload = Offload(torch.device("cpu"))
    assert offload.takes(torch.zeros(2))
    others = torch.zeros(2, device="meta"), torch.zeros(2).as_subclass(Marked)
    assert not any(offload.takes(tensor) for tensor in (*others, torch.eye(2).to_sparse()))


class Both(nn.Module):
    """A unit of two inputs, one of which stays."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        x, places = pair
        return torch.tanh(self.linear(x)) + places, places


def test_some_inputs_of_a_unit_stay(made, monkeypatch):
    monkeypatch.setattr(Offload, "takes", lambda self, tensor: tensor.dim() == 2)
    torch.manual_seed(0)
    chain = rd.Chain([Both() for _ in range(4)], backward="offload")
    other = copy.deepcopy(chain)
    other.backward = "store"
    for net in (chain, other):
        pair = torch.ones(3, 4), torch.arange(4.0)
        net(pair)[0].sum().backward()
    assert all(len(w.host or w.device or ()) <= 1 for w in all_waiting(made[0]))
    assert equal([gradients(chain)], [gradients(other)])


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


def test_halves_of_a_tensor_come_back_as_they_left(made):
    """Both runs of a unit get an input without gaps, so that the second one can stop early."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(MLP(6)) for _ in range(4)]
    chain = rd.Chain([rd.Split(), *couplings, rd.Fuse("concat")], backward="offload").double()
    other = copy.deepcopy(chain)
    other.backward = "checkpoint"
    for number in range(3):
        x = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(number)).double()
        grads, flops = [], []
        for own in (chain, other):
            inputs = x.clone().requires_grad_()
            with counting_flops() as counter:
                weigh(own(inputs)).backward()
            grads.append(gradients(own, inputs))
            flops.append(counter.get_total_flops())
            own.zero_grad()
        assert worst_error(*grads) < 1e-12
        assert made and flops[0] == flops[1]
