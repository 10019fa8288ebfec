"""Gradients of chains whose units keep different things equal those of plain backprop."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.networks import MLP, Buffered, ConvNorm, Marked, Twice
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import redivider as rd

CHOICES = ("store", "checkpoint", "reverse", "reverse-checkpoint", "offload", "overlap", "save")


def make_units() -> list[nn.Module]:
    """Return two rows of couplings of several kinds, and junctions around them."""
    torch.manual_seed(0)
    return [
        nn.Linear(6, 16),
        rd.Split(),
        rd.Coupling(Marked(8, dropout=0.5)),
        rd.Coupling(Twice(8)),
        rd.Coupling(Marked(8)),
        rd.Coupling(Buffered(8)),
        rd.Fuse("concat"),
        nn.BatchNorm1d(16),
        nn.Dropout(0.3),
        rd.Duplicate(),
        rd.Coupling(MLP(16)),
        rd.Coupling(MLP(16, dropout=0.5)),
        rd.Fuse("add"),
        Marked(16, dropout=0.5),
        nn.Linear(16, 4),
    ]


def run(chain, forward, x):
    """Return output, gradients and the random state after a backward, from one random state."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    output = forward(x)
    weigh(output).backward()
    return output.detach(), gradients(chain, x), torch.get_rng_state()


plans = st.lists(st.sampled_from(CHOICES), min_size=15, max_size=15)


@pytest.mark.slow
@given(plans, st.booleans())
def test_any_mix_gives_the_gradients_of_plain_backprop(plan, training):
    chain = rd.Chain(make_units(), backward=plan, check_every=1).double().train(training)
    assert chain.backward == tuple(plan)
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 6, dtype=torch.float64)
    output, grads, state = run(chain, chain, x)
    true_output, true_grads, true_state = run(plain, lambda x: run_plainly(plain, x), x)
    assert torch.allclose(output, true_output, rtol=0, atol=1e-12)
    assert worst_error(grads, true_grads) <= 1e-12
    assert torch.equal(state, true_state)
    for buffer, true in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, true, rtol=1e-12)


@pytest.mark.slow
@given(plans)
def test_any_mix_is_equal_to_store_to_the_last_bit_on_a_grid(plan):
    """The streams are far beyond the 24 bits that float32 has, so rounding them would show."""
    chain = rd.Chain(make_units(), backward=plan, arithmetic=rd.Fixed(bits=24), check_every=1)
    store = copy.deepcopy(chain)
    store.backward = "store"
    x = 30 * torch.randn(5, 6)
    output, grads, _ = run(chain, chain, x)
    true_output, true_grads, _ = run(store, store, x)
    assert torch.equal(output, true_output)
    for name, true in true_grads.items():
        assert torch.equal(grads[name], true), name


def test_convolutions_and_frozen_units():
    couplings = [rd.Coupling(ConvNorm(4)) for _ in range(5)]
    units = [rd.Split(dim=1), *couplings, rd.Fuse("concat", dim=1)]
    plan = ("store", "reverse", "checkpoint", "reverse", "reverse", "store", "store")
    chain = rd.Chain(units, backward=plan).double()
    chain[1].requires_grad_(False)
    chain[4].requires_grad_(False)
    plain = copy.deepcopy(chain)
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    _, grads, _ = run(chain, chain, x)
    _, true, _ = run(plain, lambda x: run_plainly(plain, x), x)
    assert worst_error(grads, true) <= 1e-12


def test_a_run_of_reversed_couplings_warns_of_drift_from_its_own_input():
    """Every run of reversed couplings compares the input that it rebuilt with the original."""
    couplings = [rd.Coupling(MLP(8)) for _ in range(4)]
    plan = ("store", "reverse", "store", "reverse")
    chain = rd.Chain(couplings, backward=plan, drift_tolerance=0.0).double()
    a, b = torch.randn(2, 50, 8, dtype=torch.float64, requires_grad=True)
    with pytest.warns(rd.DriftWarning) as warned:
        weigh(chain((a, 1e-3 * b))).backward()
    assert [str(warning.message)[:6] for warning in warned] == ["unit 3", "unit 1"]


def test_a_run_keeps_only_the_pair_at_its_top():
    """Between forward and backward a plan holds its graphs, its inputs and one pair for a run."""
    units = [rd.Coupling(nn.Linear(64, 64)) for _ in range(12)]
    streams = tuple(torch.randn(2, 128, 64))
    stream = 128 * 64 * 4

    def held(plan):
        return rd.measure_memory(rd.Chain(units, backward=plan), streams).held

    assert held(["reverse"] * 12) == 2 * stream  # the output
    # The graph of the linear layer is its input. The pair below the stored unit is that input and
    # one stream more; above it are the output and the stream that it shares with nobody.
    assert held(["reverse"] * 6 + ["store"] + ["reverse"] * 5) == 4 * stream
    assert held(["reverse"] * 6 + ["checkpoint"] * 2 + ["reverse"] * 4) == 5 * stream


def test_slices_take_their_part_of_the_plan():
    plan = ("store", "reverse", "checkpoint")
    chain = rd.Chain([rd.Coupling(nn.Linear(4, 4)) for _ in range(3)], backward=plan)
    assert chain[1:].backward == ("reverse", "checkpoint")
    assert copy.deepcopy(chain).backward == plan


@pytest.mark.parametrize(
    "plan, message",
    [
        (["store"], "names 1 strategies, and the chain has 2 units"),
        (["store", "auto"], '"auto" is for a whole chain'),
        (["store", "reverze"], "reverse"),
    ],
)
def test_wrong_plans(plan, message):
    with pytest.raises(ValueError, match=message):
        rd.Chain([nn.Linear(4, 4), nn.Linear(4, 4)], backward=plan)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def few(num: int):
    """Draw a few examples: each takes longer than those above."""
    return settings(max_examples=num, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@few(8)
@given(plan=plans)
def test_any_mix_replicated_by_ddp(group, plan):
    chain = rd.Chain(make_units(), backward=plan).double()
    plain = copy.deepcopy(chain)
    wrapped = DistributedDataParallel(chain)
    x = torch.randn(5, 6, dtype=torch.float64)
    _, grads, _ = run(chain, wrapped, x)
    _, true, _ = run(plain, lambda x: run_plainly(plain, x), x)
    assert worst_error(grads, true) <= 1e-12


@pytest.mark.slow
@few(6)
@given(plan=plans)
def test_any_mix_under_autocast(plan):
    """Gradients are near those of `store`, whose rounding to half precision is about as large."""
    chain = rd.Chain(make_units(), backward=plan)
    x = torch.randn(5, 6)
    results = []
    for backward in ("store", plan):
        own = copy.deepcopy(chain)
        own.backward = backward
        with torch.autocast("cpu", torch.bfloat16):
            _, computed, _ = run(own, own, x)
        results.append(computed)
    assert near(results[0], results[1], 2e-2)


def near(grads, others, tolerance):
    """Return whether gradients as a whole differ by less than a part of their norm."""
    true, values = (torch.cat([g.flatten() for g in own.values()]) for own in (grads, others))
    return (true - values).norm() <= tolerance * true.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_mixes_of_compiled_units():
    """Units of one kind share their graphs, so that few are compiled."""
    couplings = [rd.Coupling(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(6)]
    chain = rd.Chain(couplings).double()
    plain = copy.deepcopy(chain)
    chain.compile(backend="aot_eager")
    a = torch.randn(5, 8, dtype=torch.float64)
    choices = ("store", "checkpoint", "reverse", "overlap")
    for number in range(2):
        chain.backward = random.Random(number).choices(choices, k=6)
        for model in (chain, plain):
            model.zero_grad()
        _, grads, _ = run(chain, lambda x: chain((x, 2 * x))[0], a)
        _, true, _ = run(plain, lambda x: run_plainly(plain, (x, 2 * x))[0], a)
        assert worst_error(grads, true) <= 1e-12
