"""Couplings in a graph that is traced, for an export."""

from collections.abc import Callable, Sequence

from torch import Tensor

from redivider.arithmetic import Arithmetic
from redivider.coupling import Streams


def run_on_grid(
    residuals: Sequence[Callable[[Tensor], Tensor]], streams: Streams, arithmetic: Arithmetic
) -> Streams:
    """Run couplings on a grid for their values alone, without faults and checks.

    Args:
        residuals: The functions of the couplings.
        streams: Their input.
        arithmetic: Arithmetic that adds the residuals.
    """
    dtype = streams[0].dtype
    a, b = (arithmetic.store(stream).stored for stream in streams)
    for residual in residuals:
        a, b = arithmetic.add(b, residual(arithmetic.real(a, dtype))).stored, a
    return arithmetic.real(a, dtype), arithmetic.real(b, dtype)
