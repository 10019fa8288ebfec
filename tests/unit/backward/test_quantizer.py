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


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("size", CHANNELS)
def test_outliers_are_followed_at_once_and_leave_the_others_alone(size, bits):
    inputs, calm = stream(size), stream()
    known, codes = walk(inputs, bits)
    error = (known - inputs[1:]).abs()
    outliers = error[:, :2, CHANNELS[size]]
    others = error.clone()
    others[:, :2, CHANNELS[size]] = 0
    usual = (walk(calm, bits)[0] - calm[1:]).norm(dim=(1, 2))
    assert (others.norm(dim=(1, 2)) <= 1.2 * usual).all()
    appears, vanishes = SINK.start - 1, SINK.stop - 1
    for place in (appears, vanishes):
        assert outliers[place].max() <= 2**-8 * (size + 4)  # as exact as bfloat16
    assert outliers.max() <= 0.02 * size

    y = known[-1].clone()
    for code, expected in zip(reversed(codes), [*known.flip(0)[1:], inputs[0]], strict=True):
        move(y, code, -1)
        assert (y - expected).abs().max() <= 1e-6 * max(size, 1)


def test_outliers_take_at_most_a_twelfth_of_a_bit():
    for length in (100, 383, 384, 767, 768, 4096, 40_000):
        x, y = torch.randn(2, 2, length)
        code = encode(x, y, 2)
        assert code.places.shape == code.outliers.shape == (2, min(2, length // 384))
        assert code.places.nbytes + code.outliers.nbytes <= 2 * length / 12 / 8
        ours, true = (tensor.gather(1, code.places.long()) for tensor in (y, x))
        assert torch.allclose(ours, true, rtol=0, atol=2**-8 * 10)


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


def test_steps_off_the_grid_are_its_ends():
    x, y = torch.tensor([[1e-14], [1e15]]).expand(2, 300), torch.zeros(2, 300)
    code = encode(x, y, 2)
    assert code.exponents.tolist() == [1, 255] and y.isfinite().all()
    assert y[0, 0] < 1e-11 < 1e14 < y[1, 0] < 1e15


def test_rows_that_have_arrived_stay():
    x = torch.randn(3, 800)
    y = x.clone()
    code = encode(x, y, 2)
    assert torch.equal(y, x)
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
    code = encode(x, y, 2)
    assert y.isfinite().all() and torch.equal(y[0], clean[0])
    assert code.outliers.isfinite().all()


@pytest.mark.parametrize("size", [9e15, 9e17, 1e30])
def test_huge_differences_do_not_overflow(size):
    x, y = torch.full((2, 40_000), size), torch.zeros(2, 40_000)
    code = encode(x, y, 2)
    assert y.isfinite().all() and code.outliers.isfinite().all()
    move(y, code, -1)
    assert (y.abs() <= 1e-6 * size).all()


def test_no_values():
    for shape in ((0, 5), (3, 0)):
        encode(torch.zeros(shape), torch.zeros(shape), 2)
