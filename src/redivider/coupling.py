"""The coupling: a bijection from any module that keeps its input's shape.

    coupling   (a, b) -> (b + f(a), a)
    inverse    (c, a) -> (a, c - f(a))

One evaluation of f at `a`, with its graph, serves both the inverse and the gradient:

    recover    from the output (c, a):   r = f(a);   b = c - r
    pull back  (dc, da'):   da = da' + df(a)^T dc;   db = dc;   dtheta = d_theta f(a)^T dc

so a reversible backward costs one evaluation of f and its backward: 3 units of work against 2. Two
couplings in a row are the block y1 = x1 + F(x2), y2 = x2 + G(y1) of RevNet (Gomez et al. 2017) and
Rev-ViT (Mangalam et al. 2022); one, with its swap, is the block of PETRA (Rivaud et al. 2025).
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from redivider.errors import UnitError, writes_error
from redivider.skip import expect_no_skip, warn_of_skip

Streams: TypeAlias = tuple[Tensor, Tensor]


class Runner(Protocol):
    """Executor of couplings for the owner of the streams; a chain's row is one."""

    def couple(self, coupling: "Coupling", a: Tensor, b: Tensor, side: dict[str, Any]) -> Streams:
        """Compute (b + f(a), a)."""


class Coupling(nn.Module):
    """Bijection (a, b) -> (b + f(a), a), made from a module f that keeps its input's shape.

        coupling = Coupling(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()))
        a, b = torch.randn(2, 8, 64)
        c, a = coupling((a, b))
        a, b = coupling.inverse((c, a))

    Args:
        f: A module from a tensor to a tensor of the same shape, dtype and device.
        takes: Names of keywords that f receives beside its input: masks, positions.
    """

    def __init__(self, f: nn.Module, *, takes: Sequence[str] = ()) -> None:
        super().__init__()
        if not isinstance(f, nn.Module):
            raise TypeError(f"f must be a torch.nn.Module, got {type(f).__name__}")
        if isinstance(takes, str):
            raise TypeError(f"takes is a tuple of names: write takes=({takes!r},)")
        self.f = f
        self.takes = tuple(takes)
        expect_no_skip(f)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        expect_no_skip(self.f)

    def forward(self, streams: Streams, /, **side: Any) -> Streams:
        """Map (a, b) to (b + f(a), a); `side` goes to f. In a chain, its row does that."""
        a, b = verify_streams(streams)
        runner = _take_runner(self)
        if runner is not None:
            return runner.couple(self, a, b, side)
        return b + self.residual(a, side), a

    def inverse(self, streams: Streams, **side: Any) -> Streams:
        """Map (c, a) back to (a, b)."""
        c, a = verify_streams(streams)
        return a, c - self.residual(a, side)

    def residual(self, a: Tensor, side: dict[str, Any]) -> Tensor:
        """Evaluate f, and verify that its input is unchanged and its output can be added."""
        if torch.compiler.is_compiling() or a.is_inference():  # no version counter to compare
            return verify_residual(self.f(a, **side), a)
        version = a._version
        r = self.f(a, **side)
        if a._version != version:
            raise writes_error()
        warn_of_skip(self.f, r, a)
        return verify_residual(r, a)

    def extra_repr(self) -> str:
        return f"takes={self.takes}" if self.takes else ""


_running: ContextVar[tuple[Coupling, Runner] | None] = ContextVar("_running", default=None)


class run_by:
    """Context in which a call of a coupling is left to a runner.

    The runner is not an argument of the call, so that the caller's hooks do not see it. It is a
    class because every coupling of a step enters it, and a generator would take longer.
    """

    def __init__(self, runner: Runner, coupling: Coupling) -> None:
        self._pair = coupling, runner

    def __enter__(self) -> None:
        self._token = _running.set(self._pair)

    def __exit__(self, *_: object) -> None:
        _running.reset(self._token)


def _take_runner(coupling: Coupling) -> Runner | None:
    """Return the runner to which this call is left, if there is one.

    It is for one call: a hook that calls the coupling's forward again runs it plainly.
    """
    pair = None if torch.compiler.is_compiling() else _running.get()
    if pair is None or pair[0] is not coupling:
        return None
    _running.set(None)
    return pair[1]


def verify_streams(streams: Any) -> Streams:
    """Return the pair if it is two tensors alike in shape, dtype and device."""
    is_pair = isinstance(streams, tuple | list) and len(streams) == 2
    if not is_pair or not all(isinstance(stream, Tensor) for stream in streams):
        raise UnitError(
            f"it takes a pair of streams, one argument (a, b), got {_describe(streams)}; Duplicate "
            "or Split makes a pair of one tensor"
        )
    a, b = streams
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        raise UnitError(f"the streams differ: a is {_describe(a)}, b is {_describe(b)}")
    if not (a.is_floating_point() or a.is_complex()):
        raise UnitError(f"streams must be floating point, got {_describe(a)}")
    return a, b


def verify_residual(r: Tensor, a: Tensor) -> Tensor:
    """Return f's result if it can be added to a stream like `a` and taken away again."""
    if not isinstance(r, Tensor):
        raise UnitError(f"f must return one tensor, got {type(r).__name__}")
    # Under autocast f may compute in fewer bits than its stream has, but not in more.
    narrower = (
        a.device.type != "meta"  # which has no autocast
        and torch.is_autocast_enabled(a.device.type)
        and r.is_floating_point()
        and torch.promote_types(r.dtype, a.dtype) == a.dtype
    )
    if r.shape != a.shape or r.device != a.device or not (r.dtype == a.dtype or narrower):
        raise UnitError(
            f"f must keep shape, dtype and device: it turned {_describe(a)} into {_describe(r)}; "
            "what changes them is a junction"
        )
    return r


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
    kinds = f" of {[type(item).__name__ for item in x]}" if isinstance(x, tuple | list) else ""
    return f"{type(x).__name__}{kinds}"
