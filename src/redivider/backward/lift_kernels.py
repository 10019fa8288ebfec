"""Steps of a lifted row as Triton kernels: every step reads and writes its tensors once.

The arithmetic is that of lift.py and arithmetic.py, to the last bit. Bits are packed as `lift.pack`
does it: bit `place` of byte `column` belongs to the value at place * size + column.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redivider.backward.lift_steps import LiftSteps, Streams
from redivider.lift import PER_BYTE

BLOCK = 1024  # values of a program
COLUMNS = BLOCK // PER_BYTE
MAX_INT32 = 2**31 - PER_BYTE * BLOCK  # larger indices need 64 bits, which are slow


class LiftKernels(LiftSteps):
    """Steps of a lifted row on a GPU, for values in float32, bf16 and float16."""

    def lift(
        self, u: Tensor, x: Tensor, sign: Tensor, peak: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = triton.cdiv(u.numel(), PER_BYTE)
        lifted, value = torch.empty_like(u), torch.empty_like(u, dtype=self.dtype)
        kept = torch.empty(self.bits, size, dtype=torch.uint8, device=u.device)
        tensors = u, x, sign, lifted, value, kept, peak
        _run(_lift, size, COLUMNS, *tensors, **self._sizes(u, sign, size), BITS=self.bits)
        return lifted, value, kept

    def couple(self, u: Tensor, point: Tensor, output: Tensor, peak: Tensor) -> Streams:
        stored, value = torch.empty_like(u), torch.empty_like(u, dtype=self.dtype)
        num, output = u.numel(), output.detach().contiguous()
        tensors = u, point, output, stored, value, peak
        _run(_couple, num, BLOCK, *tensors, num=num, WIDE=num >= MAX_INT32, GRID=self.grid.bits)
        return stored, value

    def undo(
        self, u: Tensor, x: Tensor, point: Tensor, output: Tensor, sign: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        size, output = kept.shape[1], output.detach().contiguous()
        old_u, old_x, value = (torch.empty_like(u, dtype=d) for d in (u.dtype, x.dtype, self.dtype))
        tensors = u, x, point, output, sign, kept, old_u, old_x, value
        _run(_undo, size, COLUMNS, *tensors, **self._sizes(u, sign, size), BITS=self.bits)
        return old_u, old_x, value

    def pull_back(
        self, du: Tensor | None, dx: Tensor | None, through: Tensor | None, sign: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if du is None or through is None:  # rare
            return super().pull_back(du, dx, through, sign)
        du, through = du.contiguous(), through.contiguous()
        old_du, old_dx = (torch.empty_like(du, dtype=self.dtype) for _ in range(2))
        tensors = du, du if dx is None else dx.contiguous(), through, sign, old_du, old_dx
        num, per_sample = du.numel(), du.numel() // max(1, sign.numel())
        options = {"WIDE": num >= MAX_INT32, "ALIGNED": not per_sample % BLOCK, "BITS": self.bits}
        sizes = {"num": num, "per_sample": per_sample, "HAS_DX": dx is not None}
        _run(_pull_back, num, BLOCK, *tensors, **sizes, **options)
        return old_du, old_dx

    def _sizes(self, u: Tensor, sign: Tensor, size: int) -> dict[str, int]:
        """Return sizes of the tensors for a kernel with tiles of packed bytes."""
        num, per_sample = u.numel(), u.numel() // max(1, sign.numel())
        is_aligned = not (size % COLUMNS or per_sample % COLUMNS)
        options = {"WIDE": num >= MAX_INT32, "ALIGNED": is_aligned, "GRID": self.grid.bits}
        return {"num": num, "size": size, "per_sample": per_sample, **options}


def _run(kernel: Any, num: int, block: int, /, *tensors: Any, **sizes: Any) -> None:
    """Run a kernel over a number of items, a block of them in each program."""
    if num:
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            kernel[(triton.cdiv(num, block),)](*tensors, **sizes, BLOCK=block)


# Triton compiles the functions below; their types are its own.


@triton.jit
def _tile(size, num, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of packed bytes, indices of their values, masks of both, first indices."""
    program = tl.program_id(0)
    place = tl.arange(0, 8)[:, None]
    if WIDE:
        program = program.to(tl.int64)
        place = place.to(tl.int64)
    start = program * BLOCK
    column = start + tl.arange(0, BLOCK)
    first = start + place * size
    index = first + tl.arange(0, BLOCK)[None, :]
    is_column = column < size
    return column, index, is_column, is_column[None, :] & (index < num), first


@triton.jit
def _row(num, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return indices of values in a row, their mask, and the first index."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    start = program * BLOCK
    index = start + tl.arange(0, BLOCK)
    return index, index < num, start


@triton.jit
def _load_signs(sign_ptr, index, first, per_sample, mask, ALIGNED: tl.constexpr):
    """Return the signs of values; where a block of them is of one sample, by one division."""
    if ALIGNED:
        signs = tl.load(sign_ptr + first // per_sample) + tl.zeros_like(index).to(tl.int8)
    else:
        signs = tl.load(sign_ptr + index // per_sample, mask, 1)
    return signs


@triton.jit
def _real(stored, GRID: tl.constexpr):
    return stored.to(tl.float32) * (1.0 / (1 << GRID))


@triton.jit
def _steps(point, output, GRID: tl.constexpr):
    """Return the residual in steps of the grid, rounded half to even, and as it is."""
    residual = output.to(tl.float32) - point.to(tl.float32)
    steps = residual * (1.0 * (1 << GRID))
    # Adding and subtracting 2^23 rounds to whole numbers; larger ones are whole already.
    magic = tl.where(steps < 0, -8388608.0, 8388608.0)
    return tl.where(tl.abs(steps) < 8388608.0, (steps + magic) - magic, steps), residual


@triton.jit
def _note_peak(peak, size, is_bad):
    """Keep the largest value that has left the grid; infinity for a NaN."""
    size = tl.where(size == size, tl.abs(size), float("inf"))
    largest = tl.max(tl.where(is_bad, size, 0.0))
    tl.atomic_max(peak, largest, mask=largest > 0)


@triton.jit
def _lift(
    u_ptr,
    x_ptr,
    sign_ptr,
    lifted_ptr,
    value_ptr,
    kept_ptr,
    peak_ptr,
    num,
    size,
    per_sample,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRID: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column, index, is_column, mask, first = _tile(size, num, WIDE, BLOCK)
    u = tl.load(u_ptr + index, mask, 0)
    x = tl.load(x_ptr + index, mask, 0)
    sign = _load_signs(sign_ptr, index, first, per_sample, mask, ALIGNED).to(tl.int32)
    d = u - x
    step = sign * (d >> BITS)
    lifted = u + step
    wrapped = (((u ^ x) & (u ^ d)) | ((u ^ lifted) & (step ^ lifted))) < 0
    tl.store(lifted_ptr + index, lifted, mask)
    tl.store(value_ptr + index, _real(lifted, GRID).to(value_ptr.dtype.element_ty), mask)
    place = tl.arange(0, 8)[:, None]
    for bit in tl.static_range(BITS):
        byte = tl.sum(((d >> bit) & 1) << place, 0)
        tl.store(kept_ptr + column, byte.to(tl.uint8), is_column)
        kept_ptr += size
    real_u = _real(u, GRID)
    distance = real_u - _real(x, GRID)
    reached = real_u + sign.to(tl.float32) * distance * (1.0 / (1 << BITS))
    _note_peak(peak_ptr, tl.maximum(tl.abs(distance), tl.abs(reached)), wrapped & mask)


@triton.jit
def _couple(
    u_ptr,
    point_ptr,
    output_ptr,
    stored_ptr,
    value_ptr,
    peak_ptr,
    num,
    WIDE: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, mask, _ = _row(num, WIDE, BLOCK)
    u = tl.load(u_ptr + index, mask, 0)
    point = tl.load(point_ptr + index, mask, 0.0)
    output = tl.load(output_ptr + index, mask, 0.0)
    steps, residual = _steps(point, output, GRID)
    fits = tl.abs(steps) < 2147483648.0  # not so for a NaN
    step = tl.where(fits, steps, 0.0).to(tl.int32)
    stored = u + step
    is_bad = (fits == 0) | (((u ^ stored) & (step ^ stored)) < 0)
    tl.store(stored_ptr + index, stored, mask)
    tl.store(value_ptr + index, _real(stored, GRID).to(value_ptr.dtype.element_ty), mask)
    total = _real(u, GRID) + residual
    _note_peak(peak_ptr, tl.maximum(tl.abs(residual), tl.abs(total)), is_bad & mask)


@triton.jit
def _undo(
    u_ptr,
    x_ptr,
    point_ptr,
    output_ptr,
    sign_ptr,
    kept_ptr,
    old_u_ptr,
    old_x_ptr,
    value_ptr,
    num,
    size,
    per_sample,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRID: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column, index, is_column, mask, first = _tile(size, num, WIDE, BLOCK)
    point = tl.load(point_ptr + index, mask, 0.0)
    output = tl.load(output_ptr + index, mask, 0.0)
    steps, _ = _steps(point, output, GRID)
    steps = tl.where(tl.abs(steps) < 2147483648.0, steps, 0.0)
    u = tl.load(u_ptr + index, mask, 0) - steps.to(tl.int32)
    x = tl.load(x_ptr + index, mask, 0)
    sign = _load_signs(sign_ptr, index, first, per_sample, mask, ALIGNED).to(tl.int32)
    d = (sign * (x - u)) << BITS
    place = tl.arange(0, 8)[:, None]
    for bit in tl.static_range(BITS):
        byte = tl.load(kept_ptr + column, is_column, 0).to(tl.int32)
        d |= ((byte[None, :] >> place) & 1) << bit
        kept_ptr += size
    old_x = u - d
    tl.store(old_u_ptr + index, u, mask)
    tl.store(old_x_ptr + index, old_x, mask)
    tl.store(value_ptr + index, _real(old_x, GRID).to(value_ptr.dtype.element_ty), mask)


@triton.jit
def _pull_back(
    du_ptr,
    dx_ptr,
    through_ptr,
    sign_ptr,
    old_du_ptr,
    old_dx_ptr,
    num,
    per_sample,
    HAS_DX: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, mask, first = _row(num, WIDE, BLOCK)
    total = tl.load(through_ptr + index, mask, 0.0).to(tl.float32)
    if HAS_DX:
        total += tl.load(dx_ptr + index, mask, 0.0).to(tl.float32)
    du = tl.load(du_ptr + index, mask, 0.0).to(tl.float32)
    sign = _load_signs(sign_ptr, index, first, per_sample, mask, ALIGNED).to(tl.float32)
    step = (total - du) * (sign * (1.0 / (1 << BITS)))
    tl.store(old_du_ptr + index, (total + step).to(old_du_ptr.dtype.element_ty), mask)
    tl.store(old_dx_ptr + index, (-step).to(old_dx_ptr.dtype.element_ty), mask)
