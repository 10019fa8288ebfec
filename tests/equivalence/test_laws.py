"""Laws that hold for any units, cut, accumulation, latency and method, drawn by Hypothesis."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import MLP, Buffered, Twice
from support.oracle import equal
from support.reference import METHODS
from torch import Tensor, nn

import redivider as rd
from redivider.pipeline.stages.gradients import accumulate

WIDTH = 4


@st.composite
def networks(draw):
    """Draw a function that builds a stem, rows of couplings with junctions between, and a head."""
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    kinds = draw(
        st.lists(st.sampled_from([MLP, Twice, Buffered, "dropout"]), min_size=9, max_size=9)
    )
    ends = draw(st.lists(st.sampled_from(["add", "mean", "first"]), min_size=3, max_size=3))

    def build() -> rd.Chain:
        torch.manual_seed(0)
        units: list[nn.Module] = [nn.Linear(5, WIDTH)]
        which = iter(kinds)
        for length, end in zip(rows, ends, strict=False):
            units.append(rd.Duplicate())
            for _ in range(length):
                kind = next(which)
                f = MLP(WIDTH, dropout=0.4) if kind == "dropout" else kind(WIDTH)
                units.append(rd.Coupling(f))
            units.append(rd.Fuse(end))
        return rd.Chain([*units, nn.Linear(WIDTH, 3)])

    return build


@st.composite
def cuts(draw, num_units):
    inner = draw(st.sets(st.integers(1, num_units - 1), max_size=num_units - 1))
    edges = [0, *sorted(inner), num_units]
    return [end - start for start, end in pairwise(edges)]


def batch(n: int):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(3, 5, generator=generator), torch.randint(3, (3,), generator=generator)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_nothing_is_lost_repeated_or_reordered_and_saving_changes_nothing(data):
    build = data.draw(networks())
    cut = data.draw(cuts(len(build())))
    options: dict[str, Any] = {
        "stages": cut,
        "method": data.draw(st.sampled_from(list(METHODS))),
        "accumulate": data.draw(st.integers(1, 3)),
        "latency": data.draw(st.integers(1, 3)),
        "arithmetic": data.draw(st.sampled_from(["float", "fixed"])),
        "loss": F.cross_entropy,
        "optimizer": lambda stage: torch.optim.SGD(stage.parameters(), lr=0.01, momentum=0.9),
        "seed": 3,
    }
    phases = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    saved_at = data.draw(st.integers(0, sum(phases)))
    pipe, other = rd.Pipeline(build(), **options), None
    came_out: list[int | None] = []
    losses: list[Tensor | None] = []
    fed = 0
    for number in phases:
        for _ in range(number):
            if fed == saved_at:
                other = rd.Pipeline(build(), **options)
                other.load_state_dict(pipe.state_dict())
            ticks = [p.step(*batch(fed)) for p in (pipe, other) if p is not None]
            assert all(equal(tick.loss, ticks[0].loss) for tick in ticks)
            fed += 1
            if ticks[0].microbatch is not None:
                came_out.append(ticks[0].microbatch)
                losses.append(ticks[0].loss)
            assert pipe.num_in_flight <= 2 * options["latency"] * (len(cut) - 1)
        flushed = pipe.flush()
        if other is not None:
            assert equal([t.loss for t in other.flush()], [t.loss for t in flushed])
        came_out += [tick.microbatch for tick in flushed]
        losses += [tick.loss for tick in flushed]
        assert pipe.num_in_flight == 0
        assert not any(unit.kept for stage in pipe.stages for unit in stage.units)
        assert not any((*pipe.in_flight.up, *pipe.in_flight.down))
        assert not any(
            u.weights.stash.copies for s in pipe.stages for u in s.units if u.weights.stash
        )
    assert came_out == list(range(fed))
    assert all(loss is not None and bool(torch.isfinite(loss)) for loss in losses)
    for stage in pipe.stages:
        assert stage.num_updates == fed // options["accumulate"]
        assert stage.num_pending == fed % options["accumulate"]
    if other is not None:
        assert equal(other.state_dict(), pipe.state_dict())


def test_an_incomplete_group_stays_summed_or_is_applied_on_request():
    def build():
        torch.manual_seed(0)
        model = rd.Chain(
            [nn.Linear(5, 4), rd.Split(), rd.Coupling(MLP(2)), rd.Fuse(), nn.Linear(4, 3)]
        )
        return model, rd.Pipeline(
            model,
            stages=3,
            loss=F.cross_entropy,
            accumulate=4,
            optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
        )

    model, pipe = build()
    before = [p.detach().clone() for p in model.parameters()]
    for n in range(3):
        pipe.step(*batch(n))
    pipe.flush()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {stage.num_pending for stage in pipe.stages if stage.optimizer} == {3}
    summed = [p.grad.clone() for p in model.parameters()]
    pipe.flush(update=True)
    for p, old, total in zip(model.parameters(), before, summed, strict=True):
        assert torch.allclose(p, old - 0.1 * total / 3, rtol=1e-6)
    assert {stage.num_pending for stage in pipe.stages} == {0}

    model, pipe = build()
    for n in range(3):
        pipe.step(*batch(n))
    pipe.flush()
    pipe.step(*batch(3))  # joins the next group
    pipe.flush()
    assert {stage.num_updates for stage in pipe.stages} == {1}


def test_gradients_that_share_memory_are_summed_apart():
    """Two biases that are added to the same sum get one and the same tensor from autograd."""
    first, second, third = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    shared = torch.ones(6)
    for _ in range(3):
        accumulate([first, second, third], [shared[:3], shared[:3], None])
    assert first.grad is not None and second.grad is not None
    assert torch.equal(first.grad, torch.full((3,), 3.0))
    assert torch.equal(second.grad, torch.full((3,), 3.0))
    assert third.grad is None
    assert torch.equal(shared, torch.ones(6))
    whole = torch.ones(3)
    third.grad = None
    accumulate([third], [whole])
    assert third.grad is whole, "and one that nobody shares is not copied"


@pytest.mark.parametrize("over", ["stage", "all"])
def test_clipping_by_the_norms_known_when_the_tick_began(over):
    torch.manual_seed(0)
    model = rd.Chain([nn.Linear(5, 4), rd.Split(), rd.Coupling(MLP(2)), rd.Fuse(), nn.Linear(4, 3)])
    norms: dict[int, list[float]] = {}

    class Norms(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            total = torch.stack([g.norm() for g in grads]).norm().item()
            norms.setdefault(id(self), []).append(total)
            return super().step(closure)

    class Raw(rd.Pipeline):
        """Checks the norm that the optimizer sees in every update."""

        def _update(self, stages, others_norms):
            known = [float(stage.norm) for stage in self.stages]
            super()._update(stages, others_norms)
            for stage in stages:
                others = sum(n**2 for j, n in enumerate(known) if j != stage.index)
                own = float(stage.norm)
                total = (own**2 + (others if over == "all" else 0.0)) ** 0.5
                expected = own * min(1.0, 0.05 / total) if total else 0.0
                if stage.optimizer:
                    norm = norms[id(stage.optimizer)][-1]
                    assert norm == pytest.approx(expected, rel=1e-4)
                    checked.append(total > 0.05)

    checked: list[bool] = []
    pipe = Raw(
        model,
        stages=[1, 2, 2],
        loss=F.cross_entropy,
        optimizer=lambda stage: Norms(stage.parameters(), lr=0.1),
        accumulate=2,
        clip_norm=0.05,
        clip_over=over,
    )
    for n in range(20):
        pipe.step(*batch(n))
    assert len(checked) > 20 and any(checked)


class Deep(nn.Module):
    """A loss with several children, one of which is frozen."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 3)
        self.b.bias.requires_grad_(False)

    def forward(self, output, target):
        return F.cross_entropy(self.c(torch.tanh(self.b(self.a(output)))), target)


def test_a_loss_of_several_parts_gets_its_gradients_in_order():
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), Deep()
    plain = copy.deepcopy((model, loss))
    pipe = rd.Pipeline(
        list(model),
        stages=1,
        loss=loss,
        accumulate=2,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
    )
    x, target = torch.randn(6, 5), torch.randint(3, (6,))
    pipe.step(x, target)
    plain[1](plain[0](x), target).backward()
    for mine, true in zip((model, loss), plain, strict=True):
        for one, other in zip(mine.parameters(), true.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None and other.grad is not None:
                assert torch.allclose(one.grad, other.grad, rtol=1e-6, atol=1e-8)
