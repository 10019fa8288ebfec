"""The quantizer as Triton kernels: one program a row, which reads and writes its values once."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redivider.backward.quantizer import HUGE, PER_BYTE, STEPS, Code, num_exact, place_dtype

MAX_INT32 = 2**31 - 2**20  # indices beyond need 64 bits, which are slow
# Bytes of a bit of a row that a warp takes. Within one warp, sums need no shared memory: a program
# with four warps takes four times as long.
WARP = 256
MAX_WARPS = 16


def encode_rows(x: Tensor, y: Tensor, length: int, bits: int) -> Code:
    """Move the rows of `y` towards those of `x`; return the code of the difference."""
    num, exact = y.numel() // length, num_exact(length)
    size = triton.cdiv(length, PER_BYTE)
    packed = torch.empty(num, bits, size, dtype=torch.uint8, device=y.device)
    steps = torch.empty(num, dtype=torch.float32, device=y.device)
    places = torch.empty(num, exact, dtype=place_dtype(length), device=y.device)
    code = Code(packed, steps, places, torch.empty(num, exact, device=y.device))
    constants = {"STEP": STEPS[bits], "BITS": bits, "EXACT": exact, "HUGE": HUGE}
    _run(_encode, num, x, y, *code, length, size, **constants)
    return code


def move_rows(y: Tensor, code: Code, length: int, sign: int) -> None:
    """Add a coded difference to the rows of `y`, or subtract it if the sign is -1."""
    num, bits, size = code.packed.shape
    constants = {"SIGN": sign, "BITS": bits, "EXACT": code.places.shape[1]}
    _run(_move, num, y, *code, length, size, **constants)


def _run(kernel: Any, num: int, *args: Any, **options: Any) -> None:
    """Run a kernel, one program a row."""
    first, size = args[0], args[-1]
    if first.numel():
        block = triton.next_power_of_2(size)
        largest = max(first.numel(), num * options["BITS"] * size)
        options |= {"WIDE": largest >= MAX_INT32, "BLOCK": block}
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
def _encode(
    x_ptr,
    y_ptr,
    packed_ptr,
    steps_ptr,
    places_ptr,
    exact_ptr,
    length,
    size,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    HUGE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, place, is_column, mask = _places(length, size, WIDE, BLOCK)
    x = tl.load(x_ptr + row * length + place, mask, 0.0).to(tl.float32)
    y = tl.load(y_ptr + row * length + place, mask, 0.0)
    distance = x - y
    distance = tl.where(tl.abs(distance) < HUGE, distance, 0.0)
    magnitude = tl.where(mask, tl.abs(distance), -1.0)
    for index in tl.static_range(EXACT):
        is_largest = magnitude == tl.max(magnitude)
        largest = tl.min(tl.where(is_largest, place, length))  # the first of several
        value = tl.sum(tl.where(place == largest, distance, 0.0))
        magnitude = tl.where(place == largest, -1.0, magnitude)
        tl.store(places_ptr + row * EXACT + index, largest.to(places_ptr.dtype.element_ty))
        tl.store(exact_ptr + row * EXACT + index, value)
    rest = tl.where(magnitude < 0, 0.0, distance)
    step = tl.sqrt(tl.sum(rest * rest) / length) * STEP
    code = tl.floor(rest / tl.where(step == 0, 1.0, step)) + (1 << (BITS - 1))
    code = tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1.0)
    y += tl.where(magnitude < 0, distance, step * (code - ((1 << BITS) - 1) * 0.5))
    tl.store(y_ptr + row * length + place, y, mask)
    tl.store(steps_ptr + row, step)
    level = code.to(tl.int32)
    for bit in tl.static_range(BITS):
        byte = tl.sum(((level >> bit) & 1) << tl.arange(0, 8)[:, None], 0)
        start = packed_ptr + (row * BITS + bit) * size
        tl.store(start + column, byte.to(tl.uint8), is_column)


@triton.jit
def _move(
    y_ptr,
    packed_ptr,
    steps_ptr,
    places_ptr,
    exact_ptr,
    length,
    size,
    SIGN: tl.constexpr,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, place, is_column, mask = _places(length, size, WIDE, BLOCK)
    y = tl.load(y_ptr + row * length + place, mask, 0.0)
    step = tl.load(steps_ptr + row)
    number = tl.zeros([8, BLOCK], tl.int32)
    for bit in tl.static_range(BITS):
        start = packed_ptr + (row * BITS + bit) * size
        byte = tl.load(start + column, is_column, 0).to(tl.int32)
        number |= ((byte[None, :] >> tl.arange(0, 8)[:, None]) & 1) << bit
    change = step * (number.to(tl.float32) - ((1 << BITS) - 1) * 0.5)
    for index in tl.static_range(EXACT):
        exact_place = tl.load(places_ptr + row * EXACT + index).to(tl.int32)
        change = tl.where(place == exact_place, tl.load(exact_ptr + row * EXACT + index), change)
    y += SIGN * change
    tl.store(y_ptr + row * length + place, y, mask)
