"""The lift: a residual network run reversibly, and used as it is.

A residual network computes u' = u + h(u). Beside u, a second stream x holds the point at which the
last block was evaluated. With g = 2^-bits or -2^-bits, by a sign for every sample and block:

    lift      x' = u + g (u - x)          couple    u' = u + h(x')
    inverse   u  = u' - h(x')             x  = u - (x' - u) / g

In evaluation g is 0 and x' is u: the plain network. In training h is evaluated a little away from
u, by 2^-bits of about one residual.

The division by g would amplify rounding. On the integer grid (arithmetic.py) it is a shift, and the
bits that the shift drops are kept, packed:

    lift      d = u - x;   kept = d & (2^bits - 1);   x' = u + sign (d >> bits)
    inverse   d = (sign (x' - u)) << bits | kept;     x  = u - d

Gradients pass straight through the rounding: from du' and dx' they are

    t = dx' + dh(x')^T du';   du = du' + (1 + g) t;   dx = -g t
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_BITS = 8
PER_BYTE = 8


class Lifted(NamedTuple):
    """Result of a lift: the point at which a block is evaluated, and what its inverse needs."""

    x: Tensor
    kept: Tensor
    """Bits that the shift has dropped, packed."""
    fault: Tensor
    """Flag that is set where a number does not fit into 32 bits."""


def draw_signs(like: Tensor) -> Tensor:
    """Draw 1 or -1 for every sample, in a shape that broadcasts over the stream."""
    shape = (like.shape[0], *[1] * (like.ndim - 1))
    return torch.randint(0, 2, shape, dtype=torch.int8, device=like.device).mul_(2).sub_(1)


def lift(u: Tensor, x: Tensor, sign: Tensor, bits: int) -> Lifted:
    """Return the point at which the next block is evaluated, from streams on the grid."""
    d = u - x
    step = sign * (d >> bits)  # 32 bits, whatever those of the sign
    lifted = u + step
    # A sum or a difference that has wrapped has the wrong sign.
    wrapped = (((u ^ x) & (u ^ d)) | ((u ^ lifted) & (step ^ lifted))).lt(0).any()
    return Lifted(lifted, pack((d & (2**bits - 1)).to(torch.uint8), bits), wrapped)


def undo_lift(u: Tensor, lifted: Tensor, sign: Tensor, kept: Tensor, bits: int) -> Tensor:
    """Return the point at which the block before was evaluated."""
    d = (sign * (lifted - u)) << bits
    return u - (d | unpack(kept, bits, u.shape))


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack numbers below 2^bits, given as bytes: one row of bytes for every bit."""
    num = values.numel()
    size = -(-num // PER_BYTE)
    flat = torch.nn.functional.pad(values.reshape(-1), (0, size * PER_BYTE - num))
    columns = flat.view(PER_BYTE, size)  # slices are contiguous, so that no step copies
    packed = torch.zeros(bits, size, dtype=torch.uint8, device=values.device)
    for bit in range(bits):
        for place in range(PER_BYTE):
            packed[bit] |= ((columns[place] >> bit) & 1) << place
    return packed


def unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """Return numbers that `pack` has packed, as 32-bit integers."""
    size = packed.shape[1]
    columns = torch.zeros(PER_BYTE, size, dtype=torch.int32, device=packed.device)
    for bit in range(bits):
        for place in range(PER_BYTE):
            columns[place] |= ((packed[bit] >> place) & 1).to(torch.int32) << bit
    return columns.view(-1)[: shape.numel()].view(shape)
