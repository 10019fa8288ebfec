"""Checkers for users: does a chain reverse, and are its gradients right?

Each runs the caller's own chain and leaves it as it was: weights, gradients, buffers, random state.
Each returns figures that print as a table, and raises an error that names the unit or parameter
where something is wrong. For memory see footprint.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redivider.chain import Chain, taken
from redivider.coupling import Coupling, Streams, recover, verify_residual
from redivider.errors import UnitError, naming
from redivider.replay import Call, Record
from redivider.replay.autocast import is_autocast_enabled
from redivider.row import prepare_streams
from redivider.tree import tensors_of

GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}


@dataclass(frozen=True)
class Errors:
    """Relative errors by unit or parameter."""

    what: str
    each: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.each.values(), default=0.0)

    def __str__(self) -> str:
        """The five largest."""
        largest = sorted(self.each.items(), key=lambda item: -item[1])[:5]
        rows = [f"  {error:8.1e}  {name}" for name, error in largest]
        more = [f"  and {len(self.each) - 5} more"] if len(self.each) > 5 else []
        return "\n".join([f"{self.what}: at most {self.worst:.1e}", *rows, *more])


def check_reversible(
    chain: Chain, x: Any, /, *, tolerance: float | None = None, **side: Any
) -> Errors:
    """Run the chain forwards and back again, and compare every coupling's input with the original.

    Args:
        chain: The chain, in the mode (training or evaluation) that is to be checked.
        x: Its input.
        tolerance: Relative error that is let pass; unless given the chain's `drift_tolerance`, and
            0 for an exact arithmetic.
        **side: Its keywords.
    """
    _verify_chain(chain)
    if tolerance is None:
        tolerance = 0.0 if chain.arithmetic.exact else chain.drift_tolerance
    errors: dict[str, float] = {}
    with torch.no_grad(), restored(chain):
        for in_row, units in chain.segments():
            if in_row:
                x, found = _round_trip(chain, units, x, side)
                errors |= found
            else:
                for name, unit in units:
                    with naming(name):
                        x = unit(x, **taken(unit, side))
    report = Errors("relative error of the recovered inputs", errors)
    for name, error in errors.items():  # a row is listed as it is recovered, its last unit first
        if not error <= tolerance:
            raise UnitError(
                f"{name}: its input is recovered with a relative error of {error:.1e}, more than "
                f"{tolerance:.1e}; is f deterministic, and are its values within bounds?\n{report}"
            )
    return report


def check_gradients(
    chain: Chain, x: Any, /, *, tolerance: float | None = None, **side: Any
) -> Errors:
    """Compare the chain's gradients with those of plain backprop ("store") through the same units.

    An error is divided by the larger of that gradient's norm and 1e-3 of the whole gradient's, so
    that gradients whose true value is zero do not count.

    Args:
        chain: The chain; its gradients are compared for all parameters and tensors of the input.
        x: Its input.
        tolerance: What is let pass; unless given 1e-10 for float64, 1e-3 for float32, 5e-2 below
            and under autocast, and 0 for an exact arithmetic.
        **side: Its keywords.
    """
    _verify_chain(chain)
    leaves = tensors_of((x, side))
    wanted = {f"input {i}": leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
    wanted |= {name: each for name, each in chain.named_parameters() if each.requires_grad}
    if not wanted:
        raise ValueError("neither a parameter nor the input requires grad: nothing to compare")
    got = _gradients(chain, x, side, list(wanted.values()))
    with _storing(chain):
        true = _gradients(chain, x, side, list(wanted.values()))
    if tolerance is None:
        first = next(iter(wanted.values()))
        casts = is_autocast_enabled(first.device)
        dtype = torch.get_autocast_dtype(first.device.type) if casts else first.dtype
        known = GRADIENT_TOLERANCE.get(dtype.to_real(), 5e-2)
        tolerance = 0.0 if chain.arithmetic.exact else known
    floor = 1e-3 * torch.stack([_wide(each).norm() for each in true]).norm().item()
    errors = {
        name: (_wide(a) - _wide(b)).norm().item() / max(_wide(b).norm().item(), floor, 1e-300)
        for name, a, b in zip(wanted, got, true, strict=True)
    }
    report = Errors(f"relative error of the gradients of {chain.backward!r}", errors)
    for name, error in errors.items():
        if not error <= tolerance:
            raise UnitError(
                f"{name}: its gradient differs from plain backprop's by {error:.1e}, more than "
                f"{tolerance:.1e}\n{report}"
            )
    return report


def _verify_chain(chain: Any) -> None:
    if not isinstance(chain, Chain):
        raise TypeError(f"the checkers take a Chain, got {type(chain).__name__}")


def _round_trip(
    chain: Chain, row: Sequence[tuple[str, nn.Module]], x: Any, side: dict[str, Any]
) -> tuple[Streams, dict[str, float]]:
    """Run a row forwards, then recover it, each coupling from what the one after it recovered."""
    arithmetic = chain.arithmetic
    with naming(row[0][0]):
        x = prepare_streams(x)
    dtype = x[0].dtype
    a, b = (arithmetic.store(each).stored for each in x)
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
    for name, original, call, (_, *others), record in reversed(passed):
        tensors = [arithmetic.real(b, dtype), *others]
        needs = [True, *(each.requires_grad for each in others)]
        recovered = recover(call, a, tensors, needs, record, arithmetic).b
        assert recovered is not None
        a, b = b, recovered
        errors[name] = _distance((a, b), original)
    return output, errors


def _distance(streams: Streams, original: Streams) -> float:
    difference = torch.stack(
        [(_wide(x) - y).norm() for x, y in zip(streams, original, strict=True)]
    )
    scale = torch.stack([_wide(y).norm() for y in original])
    return float(difference.norm() / scale.norm().clamp_min(1e-300))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@contextmanager
def _storing(chain: Chain) -> Iterator[None]:
    """Let a chain, and all that are inside of it, run by plain backprop."""
    configured = [(each, each.backward) for each in chain.modules() if isinstance(each, Chain)]
    try:
        for each, _ in configured:
            each.backward = "store"
        yield
    finally:
        for each, backward in configured:
            each.backward = backward


def _gradients(
    chain: Chain, x: Any, side: dict[str, Any], wanted: Sequence[Tensor]
) -> list[Tensor]:
    with restored(chain), torch.enable_grad():
        outputs = [each for each in tensors_of(chain(x, **side)) if each.requires_grad]
        if not outputs:
            raise ValueError("no output of the chain has a gradient: nothing to compare")
        # Any cotangent will do that is not constant: a sum would hide rows that are swapped.
        cotangents = [
            torch.linspace(-1, 1, each.numel()).to(each).view_as(each) for each in outputs
        ]
        return list(
            torch.autograd.grad(
                outputs, wanted, cotangents, allow_unused=True, materialize_grads=True
            )
        )


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Put random state and buffers back afterwards; inside, count no steps and watch no drift."""
    # A buffer may be made, or be another one, in between.
    buffers = [(each, dict(each._buffers)) for each in module.modules()]
    values = {buffer: buffer.clone() for buffer in module.buffers()}
    devices = {each.device for each in module.parameters()}
    devices = {each for each in devices if each.type not in ("cpu", "meta")}
    every = [(each, each.check_every) for each in module.modules() if isinstance(each, Chain)]
    for chain, _ in every:
        chain.check_every = 0
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for chain, check_every in every:
                chain.check_every = check_every
            for each, own in buffers:
                each._buffers.clear()
                each._buffers.update(own)
            with torch.no_grad():
                for buffer, value in values.items():
                    if buffer.is_meta or torch.equal(buffer, value):
                        continue  # a write would count as a change
                    buffer.copy_(value)
