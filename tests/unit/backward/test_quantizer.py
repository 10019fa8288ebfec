"""The quantizer against an obvious one, and its codes undone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compressed import approach

from redivider.backward.quantizer import STEPS, encode, move, pack, row_length, unpack


@given(
    bits=st.integers(1, 8), rows=st.integers(0, 3), num=st.integers(0, 40), seed=st.integers(0, 9)
)
def test_packed_numbers_come_back(bits, rows, num, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (rows, num), generator=generator).to(torch.uint8)
    packed = pack(values, bits)
    assert packed.numel() == rows * bits * -(-num // 8)
    assert torch.equal(unpack(packed, num), values)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(
    "shape", [(3, 100), (2, 5, 7), (2, 3, 4, 64), (1, 1), (3, 390), (2, 2, 800)], ids=str
)
def test_the_closest_level_is_taken(bits, shape):
    torch.manual_seed(bits)
    x, y = torch.randn(2, *shape, dtype=torch.float64)
    expected = approach(x, y, bits)
    known = y.clone()
    code = encode(x, known, bits)
    assert torch.allclose(known, expected, rtol=1e-12, atol=1e-12)
    move(known, code, -1)
    assert torch.allclose(known, y, rtol=1e-12, atol=1e-12)
    move(known, code, 1)
    assert torch.allclose(known, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits, most", [(1, 0.75), (2, 0.4), (3, 0.21), (4, 0.12), (8, 0.012)])
def test_more_bits_leave_a_smaller_error(bits, most):
    torch.manual_seed(0)
    x = torch.randn(4, 1000)
    y = torch.zeros_like(x)
    encode(x, y, bits)
    assert (x - y).norm() <= most * x.norm()


def test_errors_do_not_add_up():
    torch.manual_seed(0)
    inputs = torch.randn(200, 4, 100).cumsum(0)
    y, errors = inputs[0].clone(), []
    for x in inputs[1:]:
        encode(x, y, 2)
        errors.append(float((x - y).square().mean().sqrt()))
    assert max(errors[100:]) < 1.2 * max(errors[:100]) < 1.2


CHANNELS = {30: [7], 3_000: [7, 300], 1e5: [0, 767]}
SINK = range(2, 10)  # inputs that have outliers


def stream(size=0.0):
    """Return inputs of 12 blocks, of 4 tokens, two of which have outliers for a while."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 4, 768, generator=generator).mul(0.3).cumsum(0)
    for channel in CHANNELS.get(size, []):
        inputs[SINK.start : SINK.stop, :2, channel] = (
            size * torch.linspace(1, 1.02, len(SINK))[:, None]
        )
    return inputs


def walk(inputs, bits):
    """Return what is known of inputs after the first, and the codes."""
    y, known, codes = inputs[0].clone(), [], []
    for x in inputs[1:]:
        codes.append(encode(x, y, bits))
        known.append(y.clone())
    return torch.stack(known), codes


SPREAD = {1: 2.1, 2: 1.3, 3: 0.7, 8: 0.04}  # of a step, in differences of the others


@pytest.mark.parametrize("bits", SPREAD)
@pytest.mark.parametrize("size", CHANNELS)
def test_outliers_are_followed_at_once_and_leave_the_others_alone(size, bits):
    inputs, calm = stream(size), stream()
    known, codes = walk(inputs, bits)
    error = (known - inputs[1:]).abs()
    outliers = error[:, :2, CHANNELS[size]]
    others = error.clone()
    others[:, :2, CHANNELS[size]] = 0
    usual = (walk(calm, bits)[0] - calm[1:]).norm(dim=(1, 2))
    assert (others.norm(dim=(1, 2)) <= 1.2 * usual + size / 2**17).all()
    appears, vanishes = SINK.start - 1, SINK.stop - 1
    for place in (appears, vanishes):
        # As exact as the others; of the largest size, a share of the range of 22 bits.
        assert outliers[place].max() <= max(SPREAD[bits], size / 2**20)
    assert outliers.max() <= 0.02 * size

    y = known[-1].clone()
    for code, expected in zip(reversed(codes), [*known.flip(0)[1:], inputs[0]], strict=True):
        move(y, code, -1)
        assert (y - expected).abs().max() <= 1e-6 * max(size, 1)


def test_outliers_take_at_most_a_twelfth_of_a_bit():
    for length in (100, 383, 384, 767, 768, 4096, 40_000):
        x, y = torch.randn(2, 2, length)
        code = encode(x, y, 2)
        assert code.outliers.shape == (2, min(2, length // 384))
        assert code.outliers.nbytes <= 2 * length / 12 / 8


@pytest.mark.parametrize("places", [[0], [767], [3, 700]], ids=str)
def test_outliers_alone_are_kept(places):
    """The other values have arrived, and leave no step to count in."""
    y = torch.randn(2, 768).double()
    x = y.clone()
    x[1, places] += torch.tensor([300.0, -2e4])[: len(places)].double()
    before = y.clone()
    code = encode(x, y, 2)
    error = (y - x).abs()
    assert error[:, places].max() <= 2e4 / 2**20 and not error[0].any()
    rest = error.clone()
    rest[1, places] = 0
    assert rest.max() <= 2 * 2e4 / 2**20
    move(y, code, -1)
    assert torch.allclose(y, before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", [32_800, 70_000])
def test_outliers_far_in_a_row(length):
    x, y = torch.zeros(2, 2, length)
    x[:, [100, length - 1]] = torch.tensor([[-40.0, 50.0], [60.0, -70.0]])
    before = y.clone()
    code = encode(x, y, 8)
    assert (x - y).abs().max() <= 0.01
    move(y, code, -1)
    assert torch.equal(y, before)


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [768, 4096])
def test_long_rows_take_at_most_a_tenth_of_a_bit_more_for_every_bit(length, bits):
    x, y = torch.randn(2, 3, length)
    nbytes = sum(part.nbytes for part in encode(x, y, bits))
    assert nbytes <= 1.1 * bits / 8 * x.numel()


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_steps_lie_on_a_grid_from_the_smallest_to_the_largest(bits):
    torch.manual_seed(bits)
    sizes = 10.0 ** torch.arange(-8, 9)
    x = torch.randn(len(sizes), 300) * sizes[:, None]
    y = torch.zeros_like(x)
    code = encode(x, y, bits)
    assert code.exponents.dtype == torch.uint8 and code.exponents.unique().numel() == len(sizes)
    best = STEPS[bits] * x.square().mean(1).sqrt()
    apart = y.sub(x).abs().amin(1)  # the closest value of every row lies near a level
    assert (apart <= 0.01 * best).all()
    near = x.abs() < (2**bits / 2 - 0.5) * best[:, None]
    assert ((y - x).abs()[near] <= (0.5 * 2 ** (1 / 6) * best[:, None].expand_as(x))[near]).all()


def test_differences_below_the_grid_stay_and_those_above_are_followed_slowly():
    x, y = torch.tensor([[1e-14], [1e15]]).expand(2, 300), torch.zeros(2, 300)
    code = encode(x, y, 2)
    assert code.exponents.tolist() == [0, 255]
    assert not y[0].any() and 1e14 < y[1, 0] < 1e15


@pytest.mark.parametrize("size", [0, 1])
def test_rows_that_have_arrived_stay(size):
    x = size * torch.randn(3, 800)
    y = x.clone()
    code = encode(x, y, 2)
    assert torch.equal(y, x) and not code.exponents.any()
    move(y, code, -1)
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    "shape, length",
    [
        *(((8, 10, 768), 768), ((8, 64, 7, 7), 3136), ((8, 16, 16, 8), 128)),
        *(((8, 3), 24), ((8,), 8), ((8, 0), 1), ((0, 8), 1), ((), 1)),
        *(((64, 12), 96), ((66, 12), 72), ((1009, 12), 12), ((6, 3, 12), 72)),
    ],
)
def test_a_row_is_at_least_64_values_of_few_samples(shape, length):
    assert row_length(torch.Size(shape)) == length


@pytest.mark.parametrize(
    "shape", [(64, 12), (66, 8), (64, 3, 12), (8, 4, 64), (4, 3, 768)], ids=str
)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_a_code_takes_at_most_half_a_bit_more_a_value(shape, bits):
    x, y = torch.randn(2, *shape)
    assert sum(part.nbytes for part in encode(x, y, bits)) <= x.numel() * (bits + 0.5) / 8


def test_values_that_are_not_finite_are_not_followed():
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 800)
    clean = y.clone()
    encode(x, clean, 2)
    x[1, 7], x[2, 3] = torch.inf, torch.nan
    encode(x, y, 2)
    assert y.isfinite().all() and torch.equal(y[0], clean[0])


@pytest.mark.parametrize("size", [9e15, 9e17, 1e30])
def test_huge_differences_do_not_overflow(size):
    x, y = torch.full((2, 40_000), size), torch.zeros(2, 40_000)
    code = encode(x, y, 2)
    assert y.isfinite().all() and bool(y.any()) == (size < 1e16)
    move(y, code, -1)
    assert (y.abs() <= 1e-6 * size).all()


def test_no_values():
    for shape in ((0, 5), (3, 0)):
        encode(torch.zeros(shape), torch.zeros(shape), 2)
