"""The grid: exact reversal in every precision of f, and no silent overflow of its range."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.networks import MLP, ConvNorm, Twice, vector_chain
from support.oracle import weigh
from torch import nn

import redivider as rd
from redivider.arithmetic import Fixed, Float, resolve_arithmetic


@given(
    st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20),
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_subtract_undoes_add_to_the_last_bit(values, bits, dtype):
    grid = Fixed(bits)
    b = torch.tensor(values)
    r = (torch.arange(len(values)) * 1.7 - 3).to(dtype)
    stored, fault = grid.store(b)
    assert not fault
    total, fault = grid.add(stored, r)
    assert not fault
    assert torch.equal(grid.subtract(total, r), stored)


@given(st.floats(-2000, 2000, width=32))
def test_the_real_value_lies_within_half_a_step(value):
    grid = Fixed(20)
    stored, fault = grid.store(torch.tensor([value]))
    assert not fault
    assert abs(grid.real(stored, torch.float64).item() - value) <= 2.0**-21
    assert grid.real(stored, torch.bfloat16).dtype == torch.bfloat16


def test_every_way_out_of_the_range_is_seen():
    grid = Fixed(20)
    big, fault = grid.store(torch.tensor([2000.0]))
    assert not fault
    assert grid.add(big, torch.tensor([2000.0])).fault, "wraps to -96"
    assert grid.add(-big, torch.tensor([-2000.0])).fault
    assert not grid.add(big, torch.tensor([-2000.0])).fault
    for bad in (2048.0, -2048.1, 1e30, torch.inf, -torch.inf, torch.nan):
        assert grid.store(torch.tensor([0.0, bad])).fault, bad
        assert grid.add(big, torch.tensor([bad])).fault, bad
    assert not grid.store(torch.empty(0, 4)).fault


def test_unknown_arithmetics_are_refused():
    assert isinstance(resolve_arithmetic("float"), Float)
    grid = Fixed(bits=16)
    assert rd.Chain([nn.Identity()], arithmetic=grid).arithmetic is grid
    with pytest.raises(ValueError, match="'float', 'fixed'"):
        rd.Chain([nn.Identity()], arithmetic="exact")
    with pytest.raises(ValueError, match="from 0 to 30"):
        Fixed(bits=31)


class Half(nn.Module):
    """An f whose weights and arithmetic are bf16."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        ).bfloat16()

    def forward(self, x):
        return self.inner(x.bfloat16()).to(x.dtype)


class HalfTwice(Half):
    def forward(self, x):
        return super().forward(x) * torch.sigmoid(x)


def inputs_of(chain: rd.Chain) -> list[torch.Tensor]:
    """Return the inputs of the couplings' functions, filled as they run."""
    seen: list[torch.Tensor] = []
    for unit in chain:
        if isinstance(unit, rd.Coupling):
            unit.f.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("make", [Half, HalfTwice])
def test_128_couplings_in_bf16_are_rebuilt_bit_for_bit(make):
    torch.manual_seed(1)
    depth = 128
    couplings = [rd.Coupling(make()) for _ in range(depth)]
    reverse = rd.Chain([rd.Duplicate(), *couplings], arithmetic="fixed", check_every=1)
    store = copy.deepcopy(reverse)
    store.backward = "store"
    seen = inputs_of(reverse)
    x = torch.randn(4, 16)
    outcomes = []
    for chain in (reverse, store):
        leaf = x.clone().requires_grad_()
        y = chain(leaf)
        weigh(y).backward()
        outcomes.append([*y, leaf.grad, *(param.grad for param in chain.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    forward, backward = seen[:depth], seen[depth:]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert rd.check_reversible(reverse, x).worst == 0.0, "in stored form, too"


@pytest.mark.parametrize("backward", ["reverse", "checkpoint"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [MLP, Twice, lambda w: MLP(w, dropout=0.5)])
def test_outputs_and_gradients_equal_those_of_store_exactly(make, autocast, backward):
    chain = vector_chain(make, 7, arithmetic="fixed", backward=backward)
    store = copy.deepcopy(chain)
    store.backward = "store"
    x = torch.randn(5, 6)
    outcomes = []
    for model in (chain, store):
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        weigh(y).backward()
        outcomes.append([y, torch.get_rng_state(), *(param.grad for param in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_convolutions_too():
    couplings = [rd.Coupling(ConvNorm(4)) for _ in range(20)]
    chain = rd.Chain([rd.Split(dim=1), *couplings], arithmetic="fixed", check_every=1)
    assert rd.check_reversible(chain, torch.randn(2, 8, 6, 6)).worst == 0.0
    assert rd.check_gradients(chain, torch.randn(2, 8, 6, 6, requires_grad=True)).worst == 0.0


def test_the_grid_stays_close_to_floating_point():
    fixed = vector_chain(depth=6, arithmetic="fixed")
    floating = copy.deepcopy(fixed)
    floating.arithmetic = Float()
    x = torch.randn(5, 6)
    assert torch.allclose(fixed(x), floating(x), atol=1e-5)
    with torch.no_grad():
        assert torch.equal(fixed(x), fixed.eval()(x))


@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse", "reverse-checkpoint"])
def test_leaving_the_range_is_refused_before_anything_is_written(backward):
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return x * self.gain

    chain = rd.Chain(
        [rd.Duplicate(), *(rd.Coupling(Grows()) for _ in range(9))], arithmetic="fixed"
    )
    chain.backward = backward
    with pytest.raises(OverflowError, match=r"unit [3-9], Coupling\(Grows\).*Fixed\(bits=20\)"):
        chain(torch.ones(3))
    with pytest.raises(OverflowError, match="unit 1, "):
        chain(torch.full((3,), 4000.0))
    assert all(param.grad is None for param in chain.parameters())
    with torch.no_grad(), pytest.raises(OverflowError):
        chain(torch.ones(3))


@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse", "reverse-checkpoint"])
def test_an_f_that_is_not_finite_is_refused(backward):
    class Divides(nn.Module):
        def forward(self, x):
            return x / (x - x)

    units = [rd.Duplicate(), rd.Coupling(MLP(3)), rd.Coupling(Divides())]
    chain = rd.Chain(units, arithmetic="fixed", backward=backward)
    with pytest.raises(FloatingPointError, match=r"unit 2, Coupling\(Divides\).*not finite"):
        chain(torch.ones(2, 3))


def test_the_grid_in_inference_mode():
    chain, x = (
        vector_chain(MLP, 3, backward="reverse", arithmetic="fixed").eval(),
        torch.randn(4, 6),
    )
    with torch.no_grad():
        expected = chain(x)
    with torch.inference_mode():
        assert torch.equal(chain(x), expected)


@pytest.mark.parametrize("bits", [1.5, "20", -1, 31])
def test_bits_are_a_whole_number(bits):
    with pytest.raises(ValueError, match="bits must be a whole number from 0 to 30"):
        Fixed(bits)
