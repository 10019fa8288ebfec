"""Units in a graph that is traced: such a graph keeps nothing for a backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from redivider.arithmetic import Arithmetic
from redivider.backward.row import prepare_streams
from redivider.coupling import Streams


def run_traced(
    segments: Sequence[tuple[bool, Sequence[tuple[str, nn.Module]]]],
    keywords_of: Callable[[nn.Module], dict[str, Any]],
    x: Any,
    arithmetic: Arithmetic,
) -> Any:
    """Run units as plain modules; on a grid, for an export alone, for their values.

    Args:
        segments: Rows of couplings (True) and runs of other units (False), with names.
        keywords_of: Function from a unit to its keywords.
        x: Input of the first unit.
        arithmetic: Arithmetic that adds the residuals.
    """
    for in_row, units in segments:
        x = prepare_streams(x) if in_row else x
        if in_row and arithmetic.exact:
            pairs: Any = units
            calls = [partial(unit.residual, side=keywords_of(unit)) for _, unit in pairs]
            x = _run_on_grid(calls, x, arithmetic)
        else:
            for _, unit in units:
                x = unit(x, **keywords_of(unit))
    return x


def _run_on_grid(
    residuals: Sequence[Callable[[Tensor], Tensor]], streams: Streams, arithmetic: Arithmetic
) -> Streams:
    """Run couplings without faults and checks."""
    dtype = streams[0].dtype
    a, b = (arithmetic.store(stream).stored for stream in streams)
    for residual in residuals:
        a, b = arithmetic.add(b, residual(arithmetic.real(a, dtype))).stored, a
    return arithmetic.real(a, dtype), arithmetic.real(b, dtype)
