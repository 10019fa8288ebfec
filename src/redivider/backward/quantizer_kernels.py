"""The quantizer as Triton kernels: one program a row, which reads and writes its values once."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redivider.backward.quantizer import (
    EXPONENT_OF_1,
    FILL,
    HUGE,
    MAX_EXPONENT,
    PER_BYTE,
    STEPS,
    STEPS_PER_OCTAVE,
    Code,
    max_steps,
    num_outliers,
    num_place_bits,
)

MAX_INT32 = 2**31 - 2**20  # indices beyond need 64 bits, which are slow
# Bytes of a bit of a row that a warp takes. Within one warp, sums need no shared memory: a program
# with four warps takes four times as long.
WARP = 256
MAX_WARPS = 16
GRID = {"PER_OCTAVE": STEPS_PER_OCTAVE, "EXPONENT_OF_1": EXPONENT_OF_1}


def encode_rows(x: Tensor, y: Tensor, length: int, bits: int) -> Code:
    """Move the rows of `y` towards those of `x`; return the code of the difference."""
    num, apart = y.numel() // length, num_outliers(length)
    size = triton.cdiv(length, PER_BYTE)
    packed = torch.empty(num, bits, size, dtype=torch.uint8, device=y.device)
    exponents = torch.empty(num, dtype=torch.uint8, device=y.device)
    outliers = torch.empty(num, apart, dtype=torch.int32, device=y.device)
    code = Code(packed, exponents, outliers)
    constants = {"STEP": STEPS[bits], "BITS": bits, "OUTLIERS": apart, "HUGE": HUGE, "FILL": FILL}
    constants |= {"MAX_EXPONENT": MAX_EXPONENT, "MAX_STEPS": max_steps(length)}
    _run(_encode, num, x, y, *code, length, size, **constants)
    return code


def move_rows(y: Tensor, code: Code, length: int, sign: int) -> None:
    """Add a coded difference to the rows of `y`, or subtract it if the sign is -1."""
    num, bits, size = code.packed.shape
    constants = {"SIGN": sign, "BITS": bits, "OUTLIERS": code.outliers.shape[1]}
    _run(_move, num, y, *code, length, size, **constants)


def _run(kernel: Any, num: int, *args: Any, **options: Any) -> None:
    """Run a kernel, one program a row."""
    first, length, size = args[0], *args[-2:]
    if first.numel():
        block = triton.next_power_of_2(size)
        largest = max(first.numel(), num * options["BITS"] * size)
        options |= GRID | {"WIDE": largest >= MAX_INT32, "BLOCK": block}
        options["PLACE_BITS"] = num_place_bits(length)
        warps = min(max(1, block // WARP), MAX_WARPS)
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            kernel[(num,)](*args, **options, num_warps=warps)


# Triton compiles the functions below; their types are its own.


@triton.jit
def _places(length, size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the program's row, places of bytes and values in it, and masks of both."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < size
    place = tl.arange(0, 8)[:, None] * size + column[None, :]
    return row, column, place, is_column, is_column[None, :] & (place < length)


@triton.jit
def _step(exponent, PER_OCTAVE: tl.constexpr, EXPONENT_OF_1: tl.constexpr):
    """Return the step that an exponent stands for."""
    step = tl.exp2((exponent - EXPONENT_OF_1).to(tl.float32) / PER_OCTAVE)
    return tl.where(exponent > 0, step, 0.0)


@triton.jit
def _encode(
    x_ptr,
    y_ptr,
    packed_ptr,
    exponents_ptr,
    outliers_ptr,
    length,
    size,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    HUGE: tl.constexpr,
    FILL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    MAX_STEPS: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    EXPONENT_OF_1: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, place, is_column, mask = _places(length, size, WIDE, BLOCK)
    x = tl.load(x_ptr + row * length + place, mask, 0.0).to(tl.float32)
    y = tl.load(y_ptr + row * length + place, mask, 0.0)
    distance = x - y
    distance = tl.where(tl.abs(distance) < HUGE, distance, 0.0)
    magnitude = tl.where(mask, tl.abs(distance), -1.0)
    is_apart = place < 0
    most = 0.0
    for _ in tl.static_range(OUTLIERS):
        size_of_largest = tl.max(magnitude)
        largest = tl.min(tl.where(magnitude == size_of_largest, place, length))  # the first one
        most = tl.maximum(most, size_of_largest)
        is_apart |= place == largest
        magnitude = tl.where(is_apart, -1.0, magnitude)
    rest = tl.where(is_apart, 0.0, distance)
    step = tl.maximum(tl.sqrt(tl.sum(rest * rest) / length) * STEP, most / (FILL * MAX_STEPS))
    octaves = tl.log2(tl.where(step > 0, step, 1e-30))
    exponent = tl.floor(octaves * PER_OCTAVE + (EXPONENT_OF_1 + 0.5))
    exponent = tl.minimum(tl.maximum(exponent, 0.0), MAX_EXPONENT * 1.0).to(tl.int32)
    step = _step(exponent, PER_OCTAVE, EXPONENT_OF_1)
    distance = distance / tl.where(exponent == 0, 1.0, step)
    code = tl.floor(tl.where(is_apart, 0.0, distance)) + (1 << (BITS - 1))
    code = tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1.0)
    count = tl.floor(tl.where(is_apart, distance, 0.0) + 0.5)
    count = tl.minimum(tl.maximum(count, -MAX_STEPS * 1.0), MAX_STEPS - 1.0)
    y += step * tl.where(is_apart, count, code - ((1 << BITS) - 1) * 0.5)
    before = -1
    for index in tl.static_range(OUTLIERS):
        before = tl.min(tl.where(is_apart & (place > before), place, length))
        own = tl.sum(tl.where(place == before, count, 0.0)).to(tl.int32)
        tl.store(outliers_ptr + row * OUTLIERS + index, (own << PLACE_BITS) + before)
    tl.store(y_ptr + row * length + place, y, mask)
    tl.store(exponents_ptr + row, exponent.to(tl.uint8))
    level = code.to(tl.int32)
    for bit in tl.static_range(BITS):
        byte = tl.sum(((level >> bit) & 1) << tl.arange(0, 8)[:, None], 0)
        start = packed_ptr + (row * BITS + bit) * size
        tl.store(start + column, byte.to(tl.uint8), is_column)


@triton.jit
def _move(
    y_ptr,
    packed_ptr,
    exponents_ptr,
    outliers_ptr,
    length,
    size,
    SIGN: tl.constexpr,
    BITS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    EXPONENT_OF_1: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, place, is_column, mask = _places(length, size, WIDE, BLOCK)
    y = tl.load(y_ptr + row * length + place, mask, 0.0)
    step = _step(tl.load(exponents_ptr + row).to(tl.int32), PER_OCTAVE, EXPONENT_OF_1)
    number = tl.zeros([8, BLOCK], tl.int32)
    for bit in tl.static_range(BITS):
        start = packed_ptr + (row * BITS + bit) * size
        byte = tl.load(start + column, is_column, 0).to(tl.int32)
        number |= ((byte[None, :] >> tl.arange(0, 8)[:, None]) & 1) << bit
    steps = number.to(tl.float32) - ((1 << BITS) - 1) * 0.5
    for index in tl.static_range(OUTLIERS):
        outlier = tl.load(outliers_ptr + row * OUTLIERS + index)
        is_its_place = place == (outlier & ((1 << PLACE_BITS) - 1))
        steps = tl.where(is_its_place, (outlier >> PLACE_BITS).to(tl.float32), steps)
    y += SIGN * (step * steps)
    tl.store(y_ptr + row * length + place, y, mask)
