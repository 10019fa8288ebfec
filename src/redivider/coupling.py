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
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from redivider.arithmetic import Arithmetic
from redivider.errors import UnitError
from redivider.replay import Call, GraphRun, Record, writes_error
from redivider.replay.autocast import is_autocast_enabled

Streams: TypeAlias = tuple[Tensor, Tensor]


class Runner(Protocol):
    """Runs a coupling on behalf of whoever owns the streams; a chain's row of couplings is one."""

    def couple(self, coupling: "Coupling", a: Tensor, b: Tensor, side: dict[str, Any]) -> Streams:
        """Compute (b + f(a), a)."""


class Coupling(nn.Module):
    """(a, b) -> (b + f(a), a), and back.

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

    def forward(self, streams: Streams, runner: Runner | None = None, /, **side: Any) -> Streams:
        """Map (a, b) to (b + f(a), a); `side` goes to f. In a chain its row is the runner."""
        a, b = verify_streams(streams)
        if runner is not None:
            return runner.couple(self, a, b, side)
        return b + self.residual(a, side), a

    def inverse(self, streams: Streams, **side: Any) -> Streams:
        """Map (c, a) back to (a, b)."""
        c, a = verify_streams(streams)
        return a, c - self.residual(a, side)

    def residual(self, a: Tensor, side: dict[str, Any]) -> Tensor:
        """Evaluate f, and verify that it has done nothing but return what can be added."""
        if torch.compiler.is_compiling() or a.is_inference():  # these have no version to compare
            return verify_residual(self.f(a, **side), a)
        version = a._version
        r = self.f(a, **side)
        if a._version != version:
            raise writes_error()
        return verify_residual(r, a)

    def extra_repr(self) -> str:
        return f"takes={self.takes}" if self.takes else ""


class Recovered(NamedTuple):
    """A coupling's input, recovered from its output by an evaluation of f that has its graph."""

    b: Tensor | None
    """The second input stream in stored form, where it was asked for."""
    run: GraphRun
    joined: bool = False
    """Whether the gradient of `a` passes through the run as well, and is added there."""

    @property
    def is_free(self) -> bool:
        """Whether `pull_back` runs on the current CUDA stream, and not on that of the run."""
        return self.run.is_free

    def pull_back(self, dc: Tensor | None, da: Tensor | None) -> list[Tensor | None]:
        """Give the gradients of (a, b), then of f's other tensors, from those of (c, a)."""
        if self.joined:
            if da is None and dc is not None:
                da = torch.zeros_like(dc)
            sum_a, *others = self.run.pull_back([dc, da])
            return [sum_a, dc, *others]
        through_f, *others = self.run.pull_back([dc])
        if through_f is not None:
            da = through_f if da is None else da + through_f
        return [da, dc, *others]


def recover(
    call: Call,
    c: Tensor | None,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    record: Record,
    arithmetic: Arithmetic,
) -> Recovered:
    """Evaluate f once, at `tensors` (`a` in its real form first), and undo its addition to `c`."""
    joint = getattr(getattr(call.module, "_compiled_call_impl", None), "run_joint", None)
    if joint is None or arithmetic.exact:  # which needs the kernels of the forward
        run = call.rerun(tensors, needs, record)
        r = run.output
    else:
        run = call.rerun(tensors, needs, record, joint)
        r, run = run.without_first()
    b = None if c is None else arithmetic.subtract(c, r)
    return Recovered(b, run, joined=run.output is not r)


def verify_streams(streams: Any) -> Streams:
    """Return the pair if it is two tensors alike in shape, dtype and device."""
    is_pair = isinstance(streams, tuple | list) and len(streams) == 2
    if not is_pair or not all(isinstance(each, Tensor) for each in streams):
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
        is_autocast_enabled(a.device)
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
    kinds = f" of {[type(each).__name__ for each in x]}" if isinstance(x, tuple | list) else ""
    return f"{type(x).__name__}{kinds}"
