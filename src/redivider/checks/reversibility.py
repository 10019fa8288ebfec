"""Comparison of the inputs that couplings recover with the original ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redivider.backward.recovery import recover
from redivider.backward.row import prepare_streams
from redivider.chain import Chain, taken
from redivider.checks.report import Errors, verify_chain, widen
from redivider.checks.restore import restored
from redivider.coupling import Coupling, Streams, verify_residual
from redivider.errors import UnitError, naming
from redivider.replay import Call, Record
from redivider.skip import describe_skip
from redivider.skip_path import has_skip


def check_reversible(
    chain: Chain, x: Any, /, *, tolerance: float | None = None, **side: Any
) -> Errors:
    """Run the chain forward and backward, and compare every recovered input with the original.

    The report also has a note for every coupling whose f has a skip of its own.

    Args:
        chain: The chain, in the mode (training or evaluation) that is to be checked.
        x: Its input.
        tolerance: Largest relative error allowed. By default the chain's `drift_tolerance`, or 0
            for an exact arithmetic.
        **side: Its keywords.
    """
    verify_chain(chain)
    if tolerance is None:
        tolerance = 0.0 if chain.arithmetic.exact else chain.drift_tolerance
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    with torch.no_grad(), restored(chain):
        for in_row, units in chain.segments():
            if in_row:
                x, row_errors, row_notes = _round_trip(chain, units, x, side)
                errors |= row_errors
                notes |= row_notes
            else:
                for name, unit in units:
                    with naming(name):
                        x = unit(x, **taken(unit, side))
    report = Errors("relative error of the recovered inputs", errors, notes)
    for name, error in errors.items():  # in the order of recovery: the last unit of a row first
        if not error <= tolerance:
            raise UnitError(
                f"{name}: its input is recovered with a relative error of {error:.1e}, more than "
                f"{tolerance:.1e}; is f deterministic, and are its values within bounds?\n{report}"
            )
    return report


def _round_trip(
    chain: Chain, row: Sequence[tuple[str, nn.Module]], x: Any, side: dict[str, Any]
) -> tuple[Streams, dict[str, float], dict[str, str]]:
    """Run a row forward, then recover every input from what the coupling after it recovered.

    Returns:
        The output; the errors of the recovered inputs, and notes, by unit.
    """
    arithmetic = chain.arithmetic
    with naming(row[0][0]):
        x = prepare_streams(x)
    dtype = x[0].dtype
    a, b = (arithmetic.store(stream).stored for stream in x)
    passed: list[tuple[str, Streams, Call, list[Tensor], Record]] = []
    for name, coupling in row:
        assert isinstance(coupling, Coupling)
        with naming(name):
            real = arithmetic.real(a, dtype).requires_grad_()
            call, tensors = Call.split(coupling.f, (real,), taken(coupling, side))
            r, record = call.first_run(tensors, with_graph=arithmetic.exact)
            passed.append((name, (a, b), call, tensors, record))
            added = arithmetic.add(b, verify_residual(r, real))
            if added.fault is not None and added.fault:
                raise UnitError(f"a stream left the range of {arithmetic}, or f is not finite")
            a, b = added.stored, a
    output = arithmetic.real(a, dtype), arithmetic.real(b, dtype)
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, original, call, (_, *others), record in reversed(passed):
        tensors = [arithmetic.real(b, dtype), *others]
        needs = [True, *(tensor.requires_grad for tensor in others)]
        recovered = recover(call, a, tensors, needs, record, arithmetic)
        assert recovered.b is not None
        if has_skip(recovered.run.output, recovered.run.leaves[0]):
            notes[name] = describe_skip(call.module)
        a, b = b, recovered.b
        errors[name] = _distance((a, b), original)
    return output, errors, notes


def _distance(streams: Streams, original: Streams) -> float:
    difference = torch.stack(
        [(widen(x) - y).norm() for x, y in zip(streams, original, strict=True)]
    )
    scale = torch.stack([widen(y).norm() for y in original])
    return float(difference.norm() / scale.norm().clamp_min(1e-300))
