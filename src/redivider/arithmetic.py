"""Adding a residual to a stream, and undoing it.

A coupling computes c = b + r and later b = c - r. In floating point the second line is only nearly
the inverse of the first, and the difference grows with depth. On a grid of 2^-s, with the streams
held as 32-bit integers, it is the inverse to the last bit, whatever precision `f` computes in:

    store   n = round(x 2^s)           real       x = n 2^-s
    add     n + round(r 2^s)           subtract   n - round(r 2^s)

`f` sees the real value and gradients pass straight through the rounding. So a stream has a *stored*
form, which is added to, and a *real* form, which `f` reads; in floating point they are the same.

Limits of the grid: values lie within 2^(31-s), 2048 for s = 20, and `f` must give the same bits
when it is run twice on the same bits.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from redivider.errors import UnitError, not_one_of

INT32_SPAN = 2.0**31


class Checked(NamedTuple):
    """A stored stream and its fault flag: a boolean scalar on its device, or None for never."""

    stored: Tensor
    fault: Tensor | None


class Arithmetic(ABC):
    """Rules by which a stream is stored, added to and restored."""

    exact: bool
    """True if `subtract` undoes `add` to the last bit."""

    @abstractmethod
    def store(self, x: Tensor) -> Checked:
        """Turn a real stream into its stored form."""

    @abstractmethod
    def real(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values that `f` reads, without a graph, in the stream's own dtype."""

    @abstractmethod
    def add(self, stored: Tensor, r: Tensor) -> Checked:
        """Add a residual to a stored stream."""

    @abstractmethod
    def subtract(self, stored: Tensor, r: Tensor) -> Tensor:
        """Subtract a residual from a stored stream, to undo `add`."""


class Float(Arithmetic):
    """Streams in the dtype they came in; reversal up to rounding."""

    exact = False

    def __repr__(self) -> str:
        return "Float()"

    def store(self, x: Tensor) -> Checked:
        return Checked(x.detach(), None)

    def real(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.detach()

    def add(self, stored: Tensor, r: Tensor) -> Checked:
        return Checked(stored + r.detach(), None)

    def subtract(self, stored: Tensor, r: Tensor) -> Tensor:
        return stored - r.detach()


class Fixed(Arithmetic):
    """Streams as 32-bit integers on a grid of 2^-bits; reversal to the last bit."""

    exact = True

    def __init__(self, bits: int = 20) -> None:
        if not isinstance(bits, int) or not 0 <= bits <= 30:
            raise ValueError(f"bits must be a whole number from 0 to 30, got {bits!r}")
        self.bits = bits

    def __repr__(self) -> str:
        return f"Fixed(bits={self.bits})"

    def store(self, x: Tensor) -> Checked:
        steps = self._steps(x)
        # NaN fails every comparison, so one test catches NaN, infinity and values out of range.
        return Checked(steps.to(torch.int32), (steps.abs() < INT32_SPAN).all().logical_not())

    def real(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        # float32 rounds integers of more than 24 bits, but always to the same bits.
        wide = stored.to(torch.float64 if dtype == torch.float64 else torch.float32)
        return wide.mul_(2.0**-self.bits).to(dtype)

    def add(self, stored: Tensor, r: Tensor) -> Checked:
        step, fault = self.store(r)
        total = stored + step
        # A sum of two integers has wrapped if its sign differs from the sign of both.
        wrapped = ((stored ^ total) & (step ^ total)).lt(0).any()
        return Checked(total, wrapped if fault is None else wrapped | fault)

    def subtract(self, stored: Tensor, r: Tensor) -> Tensor:
        # No check: the forward added the same residual, and its fault was reported there.
        return stored - self._steps(r).to(torch.int32)

    def _steps(self, x: Tensor) -> Tensor:
        """Return the nearest whole number of grid steps, still in floating point."""
        x = x.detach()
        if x.is_complex():
            raise UnitError(f'{self} holds real numbers, got {x.dtype}; use arithmetic="float"')
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * 2.0**self.bits).round_()


ARITHMETICS: dict[str, type[Float] | type[Fixed]] = {"float": Float, "fixed": Fixed}


def resolve_arithmetic(arithmetic: str | Arithmetic) -> Arithmetic:
    """Return the arithmetic of this name; an `Arithmetic` passes through."""
    if isinstance(arithmetic, Arithmetic):
        return arithmetic
    if arithmetic not in ARITHMETICS:
        objects = ", or an object such as Fixed(bits=16)"
        raise ValueError(not_one_of("arithmetic", arithmetic, ARITHMETICS, also=objects))
    return ARITHMETICS[arithmetic]()
