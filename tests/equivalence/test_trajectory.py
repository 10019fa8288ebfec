"""The pipeline's weights follow the equations, tick by tick, for every method."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.pipelines import (
    CUTS,
    OPTIMIZERS,
    OneOff,
    batches,
    build,
    network,
    refer,
)
from support.reference import METHODS, Reference
from torch import nn

import redivider as rd
from redivider.checks.memory import Live
from redivider.pipeline.stages.lookahead import ByDisplacement, Lead

SLOW = pytest.mark.slow
BOUND = 1e-12
TICKS = 24


def distance(model: rd.Chain, reference: Reference) -> float:
    true = reference.parameters()
    pairs = [(p.detach(), true[name].detach()) for name, p in model.named_parameters()]
    assert len(pairs) == len(true)
    return max(float((p - t).norm() / t.norm()) for p, t in pairs)


def follow(cut, method, accumulate, latency, optimizer="sgd", cls=rd.Pipeline, **options):
    """Run both; return their distances after ticks, a flush, more ticks and another flush."""
    # The first stage ends five updates after its first backward.
    ticks = round(2 * latency * (len(cut) - 1)) + 5 * accumulate + 1
    model = network()
    reference = refer(model, cut, method, accumulate, latency, optimizer, **options)
    pipe = build(cls, model, cut, method, accumulate, latency, optimizer, **options)
    losses = []
    distances = []
    for number in (ticks, 5):
        for x, target in batches(number):
            reference.tick((x, target))
            tick = pipe.step(x, target)
            losses += [] if tick.loss is None else [tick.loss.item()]
        distances.append(distance(model, reference))
        reference.flush()
        losses += [tick.loss.item() for tick in pipe.flush()]
        distances.append(distance(model, reference))
    if cls is rd.Pipeline:
        assert losses == pytest.approx(reference.losses, rel=1e-11)
        assert len(losses) == ticks + 5
        assert min(reference.updates) >= 5
    assert [s.num_updates for s in pipe.stages] == reference.updates
    return distances


@pytest.mark.parametrize(
    "stages, accumulate, latency",
    [(1, 3, 3), (2, 1, 1), (2, 2, 3), (3, 3, 2), (5, 2, 1), pytest.param(10, 3, 1, marks=SLOW)],
)
def test_petra(stages, accumulate, latency):
    assert max(follow(CUTS[stages], "petra", accumulate, latency)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "muon, sgd"])
@pytest.mark.parametrize("stages, accumulate, latency", [(3, 2, 0.5), (5, 1, 1)])
def test_petra_by_muon(stages, accumulate, latency, optimizer):
    distances = follow(CUTS[stages], "petra", accumulate, latency, optimizer)
    # Orthogonalising makes small differences of the gradient's small directions larger.
    assert max(distances) <= 100 * BOUND


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in METHODS if m != "petra"])
def test_other_methods(method):
    assert max(follow(CUTS[3], method, 3, 2)) <= BOUND


@st.composite
def cuts(draw):
    """Draw the sizes of up to five stages of the network's 12 units."""
    ends = draw(st.sets(st.integers(1, 11), max_size=4))
    return [b - a for a, b in pairwise([0, *sorted(ends), 12])]


@SLOW
@settings(max_examples=6)
@given(
    cut=cuts(),
    method=st.sampled_from([*METHODS]),
    accumulate=st.integers(1, 4),
    latency=st.integers(1, 3),
    lookahead=st.sampled_from([None, "displacement", "lead"]),
    lr_by_delay=st.booleans(),
)
@example([1] * 12, "petra", 1, 1, None, False)
@example([1, 1, 3, 1, 6], "delayed-graph", 2, 1, None, False)
@example(CUTS[3], "petra", 1, 3, None, False)
@example(CUTS[5], "approximate-input", 2, 1, None, False)
def test_any_cut_and_any_options(cut, method, accumulate, latency, lookahead, lr_by_delay):
    options = {"lookahead": lookahead, "lr_by_delay": lr_by_delay}
    assert max(follow(cut, method, accumulate, latency, **options)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, optimizer",
    [*(("petra", name) for name in list(OPTIMIZERS)[1:4]), ("delayed", "adamw fused")],
)
def test_optimizers(method, optimizer):
    assert max(follow(CUTS[3], method, 2, 1, optimizer)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "lookahead, method, stages, accumulate",
    [
        ("displacement", "petra", 5, 3),
        ("lead", "petra", 5, 3),
        *(
            pytest.param("displacement", method, 3, 2, marks=SLOW)
            for method in METHODS
            if method != "petra"
        ),
        pytest.param("lead", "delayed", 3, 2, marks=SLOW),  # which acts on updates alone
    ],
)
def test_lookahead(lookahead, method, stages, accumulate):
    assert max(follow(CUTS[stages], method, accumulate, 1, lookahead=lookahead)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("lookahead, optimizer", [("displacement", "muon"), ("lead", "adamw")])
@pytest.mark.parametrize("accumulate, latency", [(1, 0.5), (2, 1)])
def test_lookahead_with_optimizers(lookahead, optimizer, accumulate, latency):
    cut, options = CUTS[5], {"lookahead": lookahead}
    assert max(follow(cut, "petra", accumulate, latency, optimizer, **options)) <= 100 * BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "lookahead, optimizer",
    [
        *(("displacement", name) for name in ("adamw", "amsgrad", "sgd plain", "sgd fused")),
        ("displacement", "groups"),
        *(("lead", name) for name in ("muon", "adam", "sgd plain", "rate as a tensor")),
    ],
)
def test_lookahead_with_other_optimizers(lookahead, optimizer):
    distances = follow(CUTS[3], "petra", 1, 1, optimizer, lookahead=lookahead)
    assert max(distances) <= 100 * BOUND


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [None, "displacement"])
@pytest.mark.parametrize("stages, accumulate, latency", [(1, 2, 1), (3, 3, 2)])
def test_rates_by_delay(stages, accumulate, latency, lookahead):
    options = {"lookahead": lookahead, "lr_by_delay": True}
    assert max(follow(CUTS[stages], "petra", accumulate, latency, **options)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw small", "groups", "rate as a tensor"])
def test_rates_by_delay_of_optimizers(optimizer):
    assert max(follow(CUTS[3], "petra", 2, 1, optimizer, lr_by_delay=True)) <= 1e-9


@SLOW
def test_rates_by_delay_without_a_schedule_and_beside_one_of_torchs():
    optimizers = []

    def optimizer(stage):
        optimizers.append(torch.optim.SGD(stage.parameters(), lr=0.7))
        if len(optimizers) > 2:  # as a scheduler sets it
            optimizers[-1].param_groups[0]["initial_lr"] = 1.4
        return optimizers[-1]

    options: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": optimizer,
        "accumulate": 4,
        "latency": 3,
    }
    pipe = rd.Pipeline(network(), stages=CUTS[5], lr_by_delay=True, **options)
    divisors = [1 + 2 * 3 * (4 - j) / 4 for j in range(5)]
    groups = [stage.optimizer.param_groups[0] for stage in pipe.stages if stage.optimizer]
    assert [group["lr"] for group in groups] == [0.7 / divisor for divisor in divisors]
    for x, target in batches(30):  # the first stage updates after 28
        pipe.step(x, target)
    assert [group["lr"] for group in groups] == [0.7 / divisor for divisor in divisors]
    scheduled = rd.Pipeline(
        network(), stages=CUTS[5], lr_by_delay=True, lr_lambda=lambda update: 1.0, **options
    )
    for x, target in batches(30):
        scheduled.step(x, target)
    groups = [stage.optimizer.param_groups[0] for stage in scheduled.stages if stage.optimizer]
    assert [group["lr"] for group in groups] == [1.4 / divisor for divisor in divisors]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_lookahead_where_a_loss_is_maximised(kind):
    """Maximising the negative loss follows the same path."""
    ends = []
    for maximize in (False, True):
        model = network()
        options: dict[str, Any] = {"lr": 0.01, "maximize": maximize}
        options |= {"momentum": 0.9} if kind is torch.optim.SGD else {}
        sign = -1 if maximize else 1

        def loss(y, target, sign=sign):
            return sign * F.cross_entropy(y, target)

        def optimizer(stage, options=options):
            return kind(stage.parameters(), **options)

        pipe = rd.Pipeline(model, stages=CUTS[3], loss=loss, optimizer=optimizer, lookahead=True)
        for x, target in batches(18):
            pipe.step(x, target)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], rtol=1e-12, atol=1e-14)


def test_lookahead_leaves_out_what_does_not_train():
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([one, other], lr=0.1, momentum=0.9)
    ahead = ByDisplacement()
    for param in (one, other):
        param.grad = torch.ones(3)
    with torch.no_grad(), ahead.watching(optimizer):
        optimizer.step()
    other.requires_grad_(False)
    assert list(ahead.predict(2).weights) == [one]


@pytest.mark.parametrize("ahead", [ByDisplacement, lambda: Lead(1.0)])
def test_a_step_that_is_skipped_leads_nowhere(ahead):
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1, fused=True)
    correction = ahead()
    paths = []
    for factor in (1.0, 3.0, 9.0):
        weight.grad = factor * torch.ones_like(weight)
        # A fused optimizer skips the last step: its gradient is a fault.
        optimizer.found_inf = torch.tensor(float(factor == 9.0))
        optimizer.grad_scale = None
        with torch.no_grad(), correction.watching(optimizer):
            optimizer.step()
        paths.append(weight.detach().clone())
    assert not torch.equal(paths[0], paths[1])
    assert torch.equal(paths[1], paths[2])
    moves = [predicted - weight for weight, predicted in correction.predict(1).weights.items()]
    assert not any(bool(move.any()) for move in moves)


class Late(nn.Module):
    """Its second weight is used from the fifth run on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(4).double()) for _ in range(2))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        y = torch.tanh(x * self.first)
        return y + x * self.second if self.runs > 20 else y


@pytest.mark.slow
@pytest.mark.parametrize("method", ["delayed", "exact-inverse"])
def test_weights_in_a_stash_do_not_move(method):
    units = [nn.Linear(5, 4), rd.Duplicate(), *(rd.Coupling(Late()) for _ in range(4)), rd.Fuse()]
    model = rd.Chain([*units, nn.Linear(8, 3)]).double()
    pipe = build(rd.Pipeline, model, "auto", method, 1, 1, lookahead=True)
    own = {id(param) for param in model.parameters()}
    pipe_units = [unit for stage in pipe.stages for unit in stage.units if unit.weights.stash]
    for x, target in batches(40):
        pipe.step(x, target)
        copies = [copy for unit in pipe_units for copy in unit.weights.stash.copies.values()]
        stashed = [weight for copy in copies for weight in copy]
        assert stashed or pipe.in_flight.tick < 25
        assert not any(id(weight) in own for weight in stashed)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_copies_of_the_weights_that_lookahead_takes(accumulate):
    model = network()
    held = []
    for lookahead in (None, True):
        with Live() as live:
            pipe = build(rd.Pipeline, model, CUTS[3], "petra", accumulate, 1, lookahead=lookahead)
            for x, target in batches(12):
                pipe.step(x, target)
            held.append(live.bytes)
        del pipe
    but_the_last = sum(p.nbytes for unit in list(model)[: -CUTS[3][-1]] for p in unit.parameters())
    assert held[1] - held[0] == 2 * but_the_last


@pytest.mark.slow
def test_what_a_caller_does_to_weights_is_no_motion():
    model = network()
    pipe = build(rd.Pipeline, model, CUTS[3], "petra", 1, 1, lookahead=True)
    for x, target in batches(20):
        pipe.step(x, target)
    stage, unit = pipe.stages[0], pipe.stages[0].units[0]

    def moves():
        pairs = zip(stage.forward_weights(unit), unit.parameters, strict=True)
        return [predicted.detach() - weight.detach() for predicted, weight in pairs]

    ahead = moves()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    later = moves()
    assert stage.num_ahead and float(ahead[0].norm()) > 0
    for one, other in zip(ahead, later, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.slow
def test_lookahead_changes_the_path():
    ends = []
    for lookahead in (None, True):
        model = network()
        pipe = build(rd.Pipeline, model, CUTS[5], "petra", 1, 1, lookahead=lookahead)
        for x, target in batches(TICKS):
            pipe.step(x, target)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float((ends[0] - ends[1]).norm()) > 1e-3


def test_names_of_lookahead():
    def make(lookahead):
        return rd.Pipeline(
            network(), stages=3, loss=F.cross_entropy, optimizer=sgd, lookahead=lookahead
        ).lookahead

    def sgd(stage):
        return torch.optim.SGD(stage.parameters(), lr=0.1)

    for name in (True, "displacement", "momentum"):
        assert make(name) == "displacement"
    assert make("lead") == "lead"
    assert make(False) is None
    assert make(None) is None
    for wrong in ("mom", ["lead"], 2):
        with pytest.raises(ValueError, match='lookahead must be True, False or "lead", got'):
            make(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_control_messages_one_tick_off_leave_the_path(method):
    assert min(follow(CUTS[3], method, 1, 1, cls=OneOff)) > 1e-4


@pytest.mark.slow
def test_the_methods_differ_from_each_other():
    """Otherwise the tests above could not distinguish them."""
    ends = {}
    for method in METHODS:
        model = network()
        pipe = build(rd.Pipeline, model, CUTS[5], method, 1, 1)
        for x, target in batches(TICKS):
            pipe.step(x, target)
        ends[method] = torch.cat([p.detach().flatten() for p in model.parameters()])
    same = {"delayed", "delayed-graph", "exact-inverse"}
    for one in METHODS:
        for other in METHODS:
            apart = float((ends[one] - ends[other]).norm())
            if one == other or {one, other} <= same:
                assert apart <= 1e-11, (one, other)
            else:
                assert apart > 1e-6, (one, other)
