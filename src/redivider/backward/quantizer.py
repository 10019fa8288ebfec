"""Quantizer: the difference of two tensors, in a few bits a value.

The values of a row share a step. 2^bits levels lie around 0, a step apart:

    x - y           code        y' = y + step * (code - 3/2), with 2 bits
    ------|---------|---------|---------|------
       0  |    1    |    2    |    3           the outermost levels are open

The step is a multiple of the row's root mean square, rounded to a power of 2^(1/3): its exponent
takes one byte.

A pretrained network may have a few values thousands of times larger than the rest of their row
(attention sinks). They would set its step. So the largest differences of a long row are kept apart
and left out of the step: as whole numbers of steps, which are as exact as the other values.
"""

from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Steps in root mean squares, by bits. From 4 bits on they are the best for a normal distribution.
# With fewer bits, larger steps give better gradients: one code covers most of an outlier.
STEPS = {1: 2.05, 2: 1.2, 3: 0.61, 4: 0.335, 5: 0.188, 6: 0.104, 7: 0.057, 8: 0.031}
MAX_BITS = 8
PER_BYTE = 8
ROW = 64  # a row has as many values at least, so that its step takes little memory
MAX_ROW = 2**16  # values of a row that kernels take
HUGE = 1e16  # larger differences, of which a sum of squares may overflow, count as 0; so does NaN
STEPS_PER_OCTAVE = 3  # these add 2 % to the squared error with 2 bits, and 8 % with 8
EXPONENT_OF_1 = 112  # from 1 to 255, that is steps from 7e-12 to 2e14; exponent 0 stands for step 0
MAX_EXPONENT = 255
MAX_OUTLIERS = 2  # differences of a row that are kept apart
VALUES_PER_OUTLIER = 384  # so that they take at most a twelfth of a bit a value
FILL = 0.85  # of the range of an outlier, since rounding may make the step smaller
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Code(NamedTuple):
    """A difference of two tensors."""

    packed: Tensor
    """Codes, packed: for every row and bit, a bit of every value."""
    exponents: Tensor
    """Exponents of the rows' steps."""
    outliers: Tensor
    """Differences that are kept apart: their steps, times 2^`num_place_bits`, plus their places."""


def row_length(shape: torch.Size) -> int:
    """Return the number of values in a row: the last dimensions, and samples if these are small."""
    length = 1
    for size in reversed(shape[1:]):
        if length >= ROW:
            break
        length *= size
    if not 0 < length < ROW:
        return max(1, length)
    num = shape[0] if shape else 1
    least = -(-ROW // length)  # samples
    if num <= least:
        return max(1, num * length)
    return length * next((count for count in range(least, 8 * least) if num % count == 0), 1)


def num_outliers(length: int) -> int:
    """Return how many differences of a row are kept apart."""
    return min(MAX_OUTLIERS, length // VALUES_PER_OUTLIER)


def num_place_bits(length: int) -> int:
    """Return how many bits of an outlier are its place in the row."""
    return (length - 1).bit_length()


def max_steps(length: int) -> int:
    """Return how many steps an outlier may lie below 0; above, it is one fewer."""
    return 2 ** (31 - num_place_bits(length)) if length <= MAX_ROW else 2**22


def encode(x: Tensor, y: Tensor, bits: int) -> Code:
    """Move `y` towards `x`, in place; return the code of the difference.

    Args:
        x: Values to approach.
        y: Values so far, contiguous and in float32 or wider.
        bits: Bits for a value.
    """
    kernels = _find_kernels(x, y)
    if kernels is not None:
        result: Code = kernels.encode_rows(x.contiguous(), y, row_length(y.shape), bits)
        return result
    rows = y.view(-1, row_length(y.shape))
    length = rows.shape[1]
    distance = x.reshape(rows.shape).to(y.dtype) - rows
    distance = torch.where(distance.abs() < HUGE, distance, 0.0)
    places = _places_of_largest(distance, num_outliers(length))
    apart = distance.gather(1, places)
    distance.scatter_(1, places, 0.0)
    steps = distance.square().mean(1).sqrt().mul_(STEPS[bits])
    most = max_steps(length)
    if places.numel():  # a step in which the outliers can be counted
        steps = torch.maximum(steps, apart.abs().amax(1) / (FILL * most))
    exponents = _to_exponents(steps)
    steps = _to_steps(exponents, distance.dtype)
    levels = 2**bits
    code = distance.div_(steps[:, None]).floor_().add_(levels // 2)
    # Where y equals x, the step is 0 and any code will do.
    code = code.nan_to_num_(0).clamp_(0, levels - 1).to(torch.uint8)
    counts = apart.div_(steps[:, None]).add_(0.5).floor_().nan_to_num_(0).clamp_(-most, most - 1)
    outliers = counts.long().mul_(2 ** num_place_bits(length)).add_(places)
    kind = torch.int32 if length <= MAX_ROW else torch.int64
    result = Code(pack(code, bits), exponents, outliers.to(kind))
    move(y, result, 1)
    return result


def move(y: Tensor, code: Code, sign: int) -> None:
    """Add a difference to `y` in place, or subtract it if the sign is -1."""
    kernels = _find_kernels(y, y)
    if kernels is not None:
        kernels.move_rows(y, code, row_length(y.shape), sign)
        return
    rows = y.view(-1, row_length(y.shape))
    middle = (2 ** code.packed.shape[1] - 1) / 2
    values = unpack(code.packed, rows.shape[1]).to(y.dtype).sub_(middle)
    place_bits = num_place_bits(rows.shape[1])
    places = code.outliers & (2**place_bits - 1)
    values.scatter_(1, places.long(), (code.outliers >> place_bits).to(y.dtype))
    rows.add_(values.mul_(_to_steps(code.exponents, y.dtype)[:, None]), alpha=sign)


def _to_exponents(steps: Tensor) -> Tensor:
    """Return the exponents of the closest steps; those below the grid are 0."""
    exponents = steps.log2().mul_(STEPS_PER_OCTAVE).add_(EXPONENT_OF_1 + 0.5).floor_()
    return exponents.clamp_(0, MAX_EXPONENT).to(torch.uint8)


def _to_steps(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the steps that exponents stand for."""
    steps = exponents.to(dtype).sub_(EXPONENT_OF_1).div_(STEPS_PER_OCTAVE).exp2_()
    return torch.where(exponents > 0, steps, 0.0)


def _places_of_largest(rows: Tensor, num: int) -> Tensor:
    """Return the places of the values of largest size in order, the first of several equal ones."""
    places = torch.empty(rows.shape[0], num, dtype=torch.long, device=rows.device)
    if num:
        sizes = rows.abs()
        for index in range(num):
            place = sizes.argmax(1, keepdim=True)
            sizes.scatter_(1, place, -1.0)
            places[:, index] = place[:, 0]
    return places.sort(1).values


def pack(rows: Tensor, bits: int) -> Tensor:
    """Pack rows of bytes, which hold numbers below 2^bits.

    Bit `place` of byte `column` belongs to the value at place * size + column, where `size` is the
    number of bytes.
    """
    num, length = rows.shape
    size = -(-length // PER_BYTE)
    columns = F.pad(rows, (0, size * PER_BYTE - length)).view(num, PER_BYTE, size)
    places = _places(rows.device)
    planes = [(((columns >> bit) & 1) << places).sum(1, dtype=torch.uint8) for bit in range(bits)]
    return torch.stack(planes, 1)


def unpack(packed: Tensor, length: int) -> Tensor:
    """Return rows of numbers that `pack` has packed, as bytes."""
    places = _places(packed.device)
    columns = packed[:, :1] >> places & 1
    for bit in range(1, packed.shape[1]):
        columns |= (packed[:, bit : bit + 1] >> places & 1) << bit
    return columns.flatten(1)[:, :length]


def _places(device: torch.device) -> Tensor:
    return torch.arange(PER_BYTE, dtype=torch.uint8, device=device)[:, None]


def _find_kernels(x: Tensor, y: Tensor) -> Any:
    """Return the module with kernels for tensors, or None."""
    has_kernels = x.is_cuda and x.dtype in KERNEL_DTYPES and y.dtype == torch.float32
    if has_kernels and row_length(y.shape) <= MAX_ROW:
        try:
            return import_module("redivider.backward.quantizer_kernels")
        except ImportError:  # torch comes with Triton on Linux only
            return None
    return None
