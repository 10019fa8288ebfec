"""Trials of units by themselves: which times count, and what is known of copies."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import redivider as rd
from redivider.budget import trial
from redivider.budget.measure import measure
from redivider.budget.meter import counting
from redivider.budget.planner import measure_step
from redivider.budget.trial import Part, Timer, Trial
from redivider.checks.flops import counting_flops
from redivider.replay import Call
from redivider.replay.buffers import changes_buffers, leaves_buffers_alone
from redivider.replay.call import trust


class Watch:
    """Stand-in for a stopwatch on a GPU, whose calls take 1 second, then 2 and so on."""

    def __init__(self, run, *, on_gpu, ahead):
        assert on_gpu and ahead
        self.host, self.expected, self.readings = 1.0, [], []

    def __call__(self, was_ahead):
        self.expected.append(self.host)
        self.was_ahead = was_ahead
        self.readings.append(partial(float, len(self.readings) + 1))


@pytest.mark.parametrize(
    "was_ahead, expected",
    [([False] * 3, 2), ([True], 2), ([False, True], 3), ([False, False, True], 4)],
)
def test_a_time_that_the_host_did_not_delay_counts_alone(monkeypatch, was_ahead, expected):
    monkeypatch.setattr(trial, "Stopwatch", Watch)
    timer, left = Timer(is_captured=True), list(was_ahead)
    timer.take(2, lambda watch: watch(True))
    read = timer.take(6, lambda watch: watch(left.pop(0)))
    assert read() == expected and not left


def test_three_units_take_the_host_three_times_as_long_as_one(monkeypatch):
    monkeypatch.setattr(trial, "Stopwatch", Watch)
    timer, watches = Timer(is_captured=True), []

    def call(watch):
        watches.append(watch)
        watch(True)

    for num in (1, 3, 3, 1):
        timer.take(num, call)
    assert watches[0].expected == [1.0, 3.0, 3.0, 1.0]


class Counting(nn.Module):
    """A layer that counts its runs."""

    runs: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x):
        self.runs += 1
        return self.layer(x) * self.fixed


class Plain(Counting):
    """A layer with buffers that it does not change."""

    def forward(self, x):
        return self.layer(x) * self.fixed


@pytest.mark.parametrize("kind", [Counting, Plain])
def test_what_is_known_of_a_module_is_known_of_its_copy(kind):
    module, x = kind(), torch.randn(5, 3)
    call, tensors = Call.split(module, (x,), {})
    call.first_run(tensors, with_graph=True)
    plain, trusted = copy.deepcopy(module), copy.deepcopy(module)
    trust(trusted, like=module)
    assert changes_buffers(trusted) == changes_buffers(module) == (kind is Counting)
    assert leaves_buffers_alone(trusted) == leaves_buffers_alone(module) == (kind is Plain)
    assert not (changes_buffers(plain) or leaves_buffers_alone(plain))

    def peak(own):
        call, tensors = Call.split(own, (x,), {})
        with counting(None) as meter:
            call.first_run(tensors, with_graph=False)
        return meter.peak_without(())

    # What is not known yet runs with its graph, and all of its buffers are copied.
    assert peak(trusted) == peak(module) < peak(plain)


class Shy(nn.Module):
    """A layer whose copies leave a module out."""

    def __init__(self):
        super().__init__()
        self.layer, self.probe = nn.Linear(3, 3), nn.Identity()

    def __getstate__(self):
        modules = {name: own for name, own in self._modules.items() if name != "probe"}
        return {**vars(self), "_modules": modules}

    def forward(self, x):
        return self.layer(x)


def test_nothing_is_known_of_a_copy_with_other_modules():
    module, x = Shy(), torch.randn(5, 3)
    call, tensors = Call.split(module, (x,), {})
    call.first_run(tensors, with_graph=True)
    other = copy.deepcopy(module)
    trust(other, like=module)
    assert not leaves_buffers_alone(other)
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(Shy()), rd.Coupling(Shy()), rd.Fuse("add")])
    assert len(rd.plan(chain, x, memory="1MiB")) == 4


class Differentiating(nn.Module):
    """A unit that computes a gradient inside of its forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.inner(z).tanh().sum(), z)
        return self.outer(x + grad)


def test_a_cost_is_that_of_a_unit_that_has_run_before():
    chain = rd.Chain([nn.Linear(6, 32), Differentiating(), nn.Linear(32, 1)])
    x = torch.randn(64, 6)
    problem = measure(chain, x, {}, torch.sum)
    (cost,) = [option.cost for option in problem.units[1] if option.choice == "checkpoint"]

    def flops(middle):
        with counting_flops() as counter:
            measure_step(chain, ("store", middle, "store"), x, torch.sum)
        return counter.get_total_flops()

    assert cost == flops("checkpoint") - flops("store") > 0


@pytest.mark.parametrize("inside", [Plain, lambda: nn.BatchNorm1d(3)])
def test_bytes_are_those_of_units_that_have_run_before(inside):
    couplings = [rd.Coupling(nn.Sequential(inside(), nn.Linear(3, 3))) for _ in range(2)]
    chain = rd.Chain([nn.Linear(3, 3), inside(), rd.Duplicate(), *couplings, rd.Fuse("add")])
    x = torch.randn(5, 3)
    first, again = (measure(chain, x, {}, torch.sum) for _ in range(2))
    assert first.units == again.units


def test_copies_in_a_row_are_known_as_their_unit_is():
    chain = rd.Chain([rd.Coupling(Plain())])
    streams = (torch.randn(5, 3), torch.randn(5, 3))
    own = Trial(Part(chain[0], {}, chain.arithmetic), streams, True, Timer(is_captured=False))
    own.run(own.alone, "checkpoint")
    first, *copies = (part.module.f for part in own.row)
    assert first is chain[0].f and len({first, *copies}) == 3
    assert all(leaves_buffers_alone(f) for f in (first, *copies))
