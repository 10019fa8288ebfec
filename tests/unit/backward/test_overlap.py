"""Order of overlapped work, on lanes that only keep a record; and the same engine on the CPU."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.lanes import OnTheCpu, Races, Recorded
from support.networks import MLP, Attention, ConvNorm
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import redivider as rd
from redivider.backward.overlap import MAIN, SIDE, Overlap
from redivider.backward.row import Row
from redivider.backward.strategy import Strategy, resolve_strategy


class Job:
    def __init__(self, number, lanes, is_bound=lambda number: True):
        self.key, self.lanes, self.bound = number, lanes, is_bound(number)
        self.is_compiled = not self.bound

        self._is_bound = is_bound

    @property
    def has_before(self):
        return self.key > 0

    def before(self):
        return type(self)(self.key - 1, self.lanes, self._is_bound) if self.key else None

    def is_bound(self, prepared):
        return self.bound

    def prepare(self):
        self.lanes.note(f"R{self.key}")
        return f"prepared {self.key}"

    def finish(self, prepared, grads):
        assert prepared == f"prepared {self.key}"
        self.lanes.note(f"B{self.key}")
        return [grad + 1 for grad in grads]


@pytest.fixture
def no_callbacks(monkeypatch):
    """Ignore callbacks for the end of a backward: there is no backward."""
    engine = type("Engine", (), {"queue_callback": staticmethod(lambda call: None)})
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)


def run(depth, lanes, is_bound):
    overlap = Overlap(torch.device("cpu"))
    overlap._make_lanes = lambda: lanes  # type: ignore[method-assign]
    grads: list[torch.Tensor | None] = [torch.zeros(())]
    for number in reversed(range(depth)):
        grads = overlap.step(Job(number, lanes, is_bound), grads)
    return overlap, grads


BOUND = {
    "all": lambda number: True,
    "none": lambda number: False,
    "even": lambda number: number % 2 == 0,
    "third": lambda number: number % 3 == 0,
}


@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.parametrize("depth", range(1, 10))
@pytest.mark.usefixtures("no_callbacks")
def test_what_needs_each_other_is_in_order_and_the_rest_is_not(depth, bound):
    lanes = Recorded()
    overlap, grads = run(depth, lanes, BOUND[bound])
    assert grads[0] == depth
    after, last = lanes.after, depth - 1
    assert sorted(after) == sorted(f"{kind}{i}" for i in range(depth) for kind in "RB")
    for i in range(depth):
        assert f"R{i}" in after[f"B{i}"]
        if bound == "all":  # the lanes take turns
            assert lanes.where[f"R{i}"] == lanes.where[f"B{i}"] == (last - i) % 2
        elif bound == "none":  # gradients on one, second runs on the other
            assert lanes.where[f"B{i}"] == MAIN
            assert lanes.where[f"R{i}"] == (SIDE if depth > 2 or i < last else MAIN)
        elif BOUND[bound](i):
            assert lanes.where[f"R{i}"] == lanes.where[f"B{i}"]
        if i < last:
            assert f"R{i + 1}" in after[f"R{i}"]
            assert f"B{i + 1}" in after[f"B{i}"]
            assert f"R{i}" not in after[f"B{i + 1}"], "the second run delays the gradient"
            assert f"B{i + 1}" not in after[f"R{i}"], "the gradient delays the second run"
    assert lanes.known[MAIN] >= set(after), "the caller's stream has waited for all"
    assert not overlap._ready and not overlap._held


@pytest.mark.usefixtures("no_callbacks")
def test_results_of_the_side_lane_live_until_it_has_waited_for_their_readers():
    lanes = Recorded()
    overlap = Overlap(torch.device("cpu"))
    overlap._make_lanes = lambda: lanes  # type: ignore[method-assign]
    held = []
    wait = lanes.wait

    def watching(lane, event):
        held.append((lane, bool(overlap._held), "read" in event))
        wait(lane, event)

    lanes.wait = watching  # type: ignore[method-assign]
    grads: list[torch.Tensor | None] = [torch.zeros(())]
    for number in (3, 2, 1, 0):
        grads = overlap.step(Job(number, lanes), grads)
        if number == 2:  # of the side lane: autograd reads them on the main lane, and lets go
            assert lanes.where["B2"] == SIDE and overlap._held
            lanes.note("read")
        if number == 1:
            assert overlap._held, "the side lane is at R0 now, and must not take their memory"
    assert (SIDE, True, True) in held, "the reader came before what the side lane waited for"


@pytest.fixture
def ahead(monkeypatch):
    """Let chains prepare units ahead on the CPU, which they otherwise do on a GPU alone."""
    overlaps = []

    def make(self, x):
        overlaps.append(OnTheCpu(torch.device("cpu")) if self.overlaps else None)
        return overlaps[-1]

    monkeypatch.setattr(Strategy, "make_overlap", make)
    return overlaps


class Whole(torch.autograd.Function):
    """tanh(x w) as one node, like a compiled module."""

    compiled_bw = True  # as torch's own have

    @staticmethod
    def forward(ctx, x, w):
        y = torch.tanh(F.linear(x, w))
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, y = ctx.saved_tensors
        dz = dy * (1 - y * y)
        return dz @ w, dz.flatten(0, -2).T @ x.flatten(0, -2)


class Node(nn.Linear):
    def forward(self, x):
        return Whole.apply(x, self.weight)


def node_chain(depth, backward):
    couplings = [rd.Coupling(Node(8, 8, bias=False)) for _ in range(depth)]
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units, backward=backward).double()


class Joint(torch.autograd.Function):
    """tanh(a w) with stand-ins for both streams, as the compiler makes it of a coupling's f.

    Like compiled code, the backward writes its results into the tensors that the forward saved.
    """

    compiled_bw = True

    @staticmethod
    def forward(ctx, a, w):
        y = torch.tanh(F.linear(a, w))
        ctx.save_for_backward(a, w, y.clone())
        ctx.mark_non_differentiable(y)
        return y, torch.empty_like(a), torch.empty_like(a)

    @staticmethod
    def backward(ctx, _, dc, da):
        a, w, y = ctx.saved_tensors
        dz = y.square_().neg_().add_(1).mul_(dc)
        dw, through_f = dz.flatten(0, -2).T @ a.flatten(0, -2), dz @ w
        return dz.copy_(through_f).add_(da), dw


class CompiledNode:
    def __init__(self, module):
        self.module = module

    def __call__(self, a):
        return self.module._call_impl(a)

    def run_joint(self, a):
        return Joint.apply(a, self.module.weight)


def joint_chain(depth, backward):
    chain = node_chain(depth, backward)
    for unit in chain:
        if isinstance(unit, rd.Coupling):
            unit.f._compiled_call_impl = CompiledNode(unit.f)
    return chain


def mixed_chain(depth, backward):
    chain = token_chain(depth, backward)
    for unit in list(chain)[3:-2:3]:
        unit.f = Node(8, 8, bias=False).double()
    return chain


def forgetful_chain(depth, backward):
    """Its functions do not save their input, so nothing but the engine holds it."""
    couplings = [rd.Coupling(nn.Sequential(nn.Tanh(), nn.Linear(8, 8))) for _ in range(depth)]
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units, backward=backward).double()


CHAINS = {
    "token": lambda *args: token_chain(*args),
    "node": node_chain,
    "joint": joint_chain,
    "mixed": mixed_chain,
    "forgetful": forgetful_chain,
}


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("backward", ["overlap", "checkpoint-overlap"])
@pytest.mark.parametrize("make", [lambda *args: token_chain(*args), node_chain])
def test_under_torchs_checkpoint_nothing_is_unpacked_twice(make, backward):
    chain = make(5, backward)
    plain = copy.deepcopy(chain)
    plain.backward = "store"
    for x in torch.randn(2, 4, 5, 6).double():
        torch.manual_seed(1)
        weigh(checkpoint(chain, x.requires_grad_(), use_reentrant=False)).backward()
        torch.manual_seed(1)
        weigh(plain(x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["overlap", "checkpoint-overlap"])
@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", CHAINS)
def test_no_lane_reads_too_early_or_takes_memory_that_the_other_one_uses(
    monkeypatch, kind, depth, backward
):
    """Watch every operation of a step, as if each lane ran whenever it may."""
    lanes = Recorded()
    monkeypatch.setattr(Overlap, "_make_lanes", lambda self: lanes)
    monkeypatch.setattr(Strategy, "make_overlap", lambda self, x: Overlap(torch.device("cpu")))
    chain = CHAINS[kind](depth, backward)
    plain = copy.deepcopy(chain)
    for param in chain.parameters():
        param.register_hook(lambda grad: grad * 1)  # takes memory between two units
    x = torch.randn(4, 5, 6).double()
    races = Races(lanes)
    rows = []
    enter = Row.enter

    def recording_enter(row, *args, **kwargs):
        rows.append(row)
        return enter(row, *args, **kwargs)

    monkeypatch.setattr(Row, "enter", recording_enter)
    for _ in range(2):  # gradients add up
        torch.manual_seed(1)
        with races:
            loss = weigh(chain(x))
            loss.backward()
        assert not any(row._lent or row._outputs for row in rows), "let go though the loss lives"
        torch.manual_seed(1)
        weigh(run_plainly(plain, x)).backward()
    assert not races.found
    assert depth == 1 or set(lanes.where.values()) == {MAIN, SIDE}
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_a_node_that_is_needed_again_is_left_to_autograd(ahead):
    chain = node_chain(4, "overlap")
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 5, 6).double()
    loss, true = weigh(chain(x)), weigh(run_plainly(plain, x))
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        true.backward(retain_graph=retain)
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def token_chain(depth, backward, dropout=0.2):
    makers = (lambda: Attention(8, 2, dropout), lambda: MLP(8, dropout))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(depth)]
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units, backward=backward).double()


@pytest.mark.parametrize("backward", ["overlap", "checkpoint-overlap"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 9])
def test_gradients_are_those_of_plain_autograd(ahead, depth, backward):
    chain = token_chain(depth, backward)
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 5, 6).double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    for _ in range(2):  # gradients add up
        torch.manual_seed(1)
        weigh(chain(x)).backward()
        torch.manual_seed(1)
        weigh(run_plainly(plain, y)).backward()
        assert worst_error(gradients(chain, x), gradients(plain, y)) <= 1e-12
    assert not ahead[-1]._ready and not ahead[-1]._held


@pytest.mark.parametrize("backward", ["overlap", "checkpoint-overlap"])
def test_every_unit_but_the_last_is_prepared_ahead(ahead, backward, monkeypatch):
    counts = {"alone": 0, "ahead": 0}
    for name, method in (("alone", "_begin"), ("ahead", "_prepare")):
        original = getattr(Overlap, method)

        def counting(self, *args, _name=name, _original=original, **options):
            counts[_name] += 1
            return _original(self, *args, **options)

        monkeypatch.setattr(Overlap, method, counting)
    weigh(token_chain(6, backward)(torch.randn(4, 5, 6).double())).backward()
    if backward == "overlap":  # one row of couplings
        assert counts == {"alone": 1, "ahead": 5}
    else:  # all units that have something to compute: stem, six couplings, fusion, head
        assert counts == {"alone": 1, "ahead": 9}


def test_rows_between_junctions_batch_norm_and_frozen_parts(ahead):
    rows = [[rd.Coupling(ConvNorm(4)) for _ in range(n)] for n in (3, 1, 2)]

    class Junction(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, streams):
            return self.conv(streams[0]), streams[1] * 2

    units = [rd.Split(dim=1), *rows[0], Junction(), *rows[1], Junction(), *rows[2], rd.Fuse(dim=1)]
    chain = rd.Chain(units, backward="overlap").double()
    for param in rows[0][1].parameters():
        param.requires_grad_(False)
    plain = copy.deepcopy(chain)
    x = torch.randn(3, 8, 6, 6).double()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-12)


def test_a_second_backward_and_some_gradients_only(ahead):
    chain = token_chain(5, "overlap", dropout=0.0)
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 5, 6).double()
    loss, true = weigh(chain(x)), weigh(run_plainly(plain, x))
    late = [5, 6]
    wanted = [list(model[i].parameters()) for model in (chain, plain) for i in late]
    grads = torch.autograd.grad(loss, wanted[0] + wanted[1], retain_graph=True)
    expected = torch.autograd.grad(true, wanted[2] + wanted[3], retain_graph=True)
    for grad, true_grad in zip(grads, expected, strict=True):
        assert torch.allclose(grad, true_grad, rtol=1e-12)
    assert not ahead[-1]._ready, "what was prepared for units that were not asked is let go"
    for _ in range(2):
        loss.backward(retain_graph=True)
        true.backward(retain_graph=True)
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_too_little_memory_to_prepare_ahead_is_no_error(ahead, monkeypatch):
    chain = token_chain(5, "overlap", dropout=0.0)
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 5, 6).double()
    loss = weigh(chain(x))
    runs = []
    forward = type(chain[4].f).forward

    def failing(self, *args, **kwargs):
        runs.append(self)
        if len(runs) == 3:
            raise torch.OutOfMemoryError("no room")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(chain[4].f), "forward", failing)
    loss.backward()
    assert len(runs) > 3
    monkeypatch.undo()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_units_with_many_parameters_are_prepared_ahead_too(ahead, monkeypatch):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(40)])

        def forward(self, x):
            return torch.tanh(x * sum(self.scales) / 40)

    count = []
    original = Overlap._prepare

    def counting(*args):
        count.append(1)
        return original(*args)

    monkeypatch.setattr(Overlap, "_prepare", counting)
    couplings = [rd.Coupling(Wide()) for _ in range(6)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward="checkpoint-overlap")
    x = torch.randn(3, 8, requires_grad=True)
    chain(x).sum().backward()
    assert len(count) == 7


def test_a_unit_that_nobody_asks_may_have_changed(ahead):
    chain = token_chain(5, "overlap", dropout=0.0)
    loss = weigh(chain(torch.randn(4, 5, 6).double()))
    with torch.no_grad():
        next(chain[3].parameters()).mul_(2)
    torch.autograd.grad(loss, list(chain[5].parameters()), retain_graph=True)
    with pytest.raises(rd.ChangedError, match="unit 3"):
        loss.backward()
    assert not ahead[-1]._ready


@pytest.mark.usefixtures("no_callbacks")
def test_the_side_lane_waits_for_what_autograd_did_on_the_main_one():
    """Or it would take memory that a reader on the main lane still needs."""
    lanes = Recorded()
    overlap = Overlap(torch.device("cpu"))
    overlap._make_lanes = lambda: lanes  # type: ignore[method-assign]
    grads: list[torch.Tensor | None] = [torch.zeros(())]
    for number in reversed(range(6)):
        grads = overlap.step(Job(number, lanes), grads)
        lanes.note(f"A{number}")  # autograd adds gradients up, and lets go of them
    for number in range(4):
        if lanes.where[f"R{number}"] == SIDE:
            assert f"A{number + 2}" in lanes.after[f"R{number}"]


@pytest.mark.usefixtures("no_callbacks")
def test_what_is_left_over_is_joined_before_it_is_let_go():
    lanes = Recorded()
    overlap = Overlap(torch.device("cpu"))
    overlap._make_lanes = lambda: lanes  # type: ignore[method-assign]
    overlap.step(Job(3, lanes), [torch.zeros(())])
    assert lanes.where["R2"] == SIDE and "R2" not in lanes.known[MAIN]
    overlap.end()
    assert "R2" in lanes.known[MAIN] and not overlap._ready


@pytest.mark.usefixtures("no_callbacks")
def test_the_side_lane_is_joined_where_a_unit_fails():
    """Memory runs out twice: in the preparation, which is not reported, and in the unit."""
    lanes = Recorded()
    overlap = Overlap(torch.device("cpu"))
    overlap._make_lanes = lambda: lanes  # type: ignore[method-assign]
    grads = overlap.step(Job(3, lanes), [torch.zeros(())])

    class Failing(Job):
        def prepare(self):
            raise torch.OutOfMemoryError("no room")

        def finish(self, prepared, grads):
            self.lanes.note(f"B{self.key}")
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        overlap.step(Failing(2, lanes), grads)
    assert lanes.where["B2"] == SIDE and "B2" in lanes.known[MAIN]


def test_on_the_cpu_it_is_reverse():
    grads: list[dict[str, Any]] = []
    chains = [token_chain(3, backward) for backward in ("overlap", "reverse")]
    chains[1].load_state_dict(chains[0].state_dict())
    x = torch.randn(4, 5, 6).double()
    for chain in chains:
        assert resolve_strategy(chain.backward).make_overlap(x) is None
        torch.manual_seed(2)
        weigh(chain(x)).backward()
        grads.append(gradients(chain))
    assert all(torch.equal(grads[0][key], grads[1][key]) for key in grads[0])
