"""Kernels of the quantizer do what plain torch does.

They also run without a GPU, where Triton is installed: TRITON_INTERPRET=1 pytest THIS_FILE
"""

import os

import pytest
import torch

from redivider.backward.quantizer import (
    MAX_BITS,
    encode,
    move,
    num_place_bits,
    row_length,
    unpack,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from redivider.backward import quantizer_kernels  # noqa: E402
from redivider.backward.quantizer_kernels import encode_rows, move_rows  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A byte that is not full, a row of several dimensions, of one byte, one and two outliers,
# places of 16 and 32 bits, and nothing at all.
SHAPES = [(2, 5, 100), (3, 4, 6, 7), (3, 1), (3, 390), (2, 8192), (2, 33000), (4, 0), (0, 64)]


def tensors(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, *shape, generator=generator).to(DEVICE)
    return x.to(dtype), y


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, MAX_BITS])
def test_forth_and_back(bits, dtype, shape):
    x, y = tensors(shape, dtype)
    length = row_length(y.shape)
    plain, known = y.cpu().clone(), y.clone()
    code = encode(x.cpu(), plain, bits)
    got = encode_rows(x, known, length, bits)
    assert [(part.shape, part.dtype) for part in got] == [(p.shape, p.dtype) for p in code]
    assert torch.equal(got.exponents.cpu(), code.exponents)
    bits_of_place = num_place_bits(length)
    mask = 2**bits_of_place - 1
    assert torch.equal(got.outliers.cpu() & mask, code.outliers & mask)
    counts = [part.outliers.cpu() >> bits_of_place for part in (got, code)]
    assert not counts[0].numel() or (counts[0] - counts[1]).abs().max() <= 1
    # Steps that differ in their last bit may round a value that lies between two levels otherwise.
    numbers = [unpack(rows.cpu(), length).int() for rows in (got.packed, code.packed)]
    differ = numbers[0] != numbers[1]
    assert differ.float().mean() <= 0.001 if differ.numel() else True
    same = ~differ.view(y.shape)
    assert torch.allclose(known.cpu()[same], plain[same], rtol=1e-5, atol=1e-5)
    there = known.clone()
    move_rows(known, got, length, -1)
    assert torch.allclose(known, y, rtol=1e-5, atol=1e-5)
    move_rows(known, got, length, 1)
    assert torch.allclose(known, there, rtol=1e-5, atol=1e-5)


def test_a_row_that_has_arrived_stays():
    _, y = tensors((3, 800), torch.float32)
    known = y.clone()
    code = encode_rows(y, known, 800, 2)
    assert not code.exponents.any() and torch.equal(known, y)
    move_rows(known, code, 800, -1)
    assert torch.equal(known, y)


@pytest.mark.parametrize("places", [[3], [799, 0], [5, 700, 6, 701], range(800)], ids=str)
def test_the_first_of_equal_differences_are_kept_apart(places):
    _, y = tensors((2, 800), torch.float32)
    x, plain, known = y.clone(), y.cpu().clone(), y.clone()
    x[1, places] = y[1, places].round() + 1024
    for own in (y, known, plain):
        own[1, places] = own[1, places].round()
    code, got = encode(x.cpu(), plain, 2), encode_rows(x, known, 800, 2)
    mask = 2 ** num_place_bits(800) - 1
    assert torch.equal(got.outliers.cpu() & mask, code.outliers & mask)
    assert (got.outliers.cpu() - code.outliers).abs().max() <= 2 * (mask + 1)
    first = sorted(places)[:2]
    step = 2 ** ((int(got.exponents[1]) - 112) / 3)
    assert torch.allclose(known[:, first], x[:, first], rtol=0, atol=0.501 * step)
    move_rows(known, got, 800, -1)
    assert torch.allclose(known, y, rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_values_that_are_not_finite_are_not_followed():
    x, y = tensors((3, 800), torch.float32)
    x[1, 7], x[2, 3] = torch.inf, torch.nan
    code = encode_rows(x, y, 800, 2)
    assert y.isfinite().all() and code.outliers.any()


def test_the_ends_of_the_grid():
    sizes = 10.0 ** torch.arange(-14, 16, device=DEVICE)[:, None]
    x = torch.randn(30, 300, device=DEVICE) * sizes
    known, plain = torch.zeros_like(x), torch.zeros(30, 300)
    code, got = encode(x.cpu(), plain, 2), encode_rows(x, known, 300, 2)
    assert torch.equal(got.exponents.cpu(), code.exponents)
    assert {0, 255} < set(code.exponents.tolist())
    assert ((known.cpu() - plain).abs() > 1e-5 * plain.abs()).float().mean() <= 0.001


def test_indices_of_64_bits(monkeypatch):
    monkeypatch.setattr(quantizer_kernels, "MAX_INT32", 0)
    test_forth_and_back(2, torch.float32, (2, 5, 100))


@pytest.mark.skipif(INTERPRETED, reason="the quantizer chooses kernels for a GPU's tensors")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_quantizer_uses_them(dtype):
    x, y = tensors((2, 100, 5), dtype)
    by_kernel, by_torch = y.clone(), y.cpu().clone()
    code = encode(x.transpose(1, 2).contiguous().transpose(1, 2), by_kernel, 2)
    encode(x.cpu(), by_torch, 2)
    assert (by_kernel.cpu() - by_torch).abs().gt(1e-5).float().mean() <= 0.001
    move(by_kernel, code, -1)
    assert torch.allclose(by_kernel, y, rtol=1e-5, atol=1e-5)
