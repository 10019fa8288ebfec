"""A row: consecutive couplings, which share the memory of one pair of streams.

In the forward each coupling hands its output to the next and keeps nothing; the last one keeps its
output. In the backward each recovers its input and hands it to the one before:

    forward    (a, b) --> coupling 0 --> coupling 1 --> ... --> coupling n-1 --> (c, a), kept
    backward   (a, b) <-- coupling 0 <-- coupling 1 <-- ... <-- coupling n-1 <--

What is handed on, beside what autograd sees, is the stored form of the streams (arithmetic.py).
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from redivider.arithmetic import Arithmetic
from redivider.coupling import (
    Coupling,
    Recovered,
    Streams,
    recover,
    verify_residual,
    verify_streams,
)
from redivider.drift import Drift
from redivider.errors import UnitError
from redivider.mailbox import Mailbox
from redivider.node import Kept, keep_input
from redivider.overlap import Overlap
from redivider.replay import Call, Record
from redivider.replay.autocast import is_autocast_enabled

Keep: TypeAlias = Literal["graph", "input", "nothing"]


class Row:
    """Runs the consecutive couplings of one forward pass, and of its backward.

    Args:
        names: Index and name of each coupling, for errors.
        keep: What a coupling keeps between forward and backward.
        arithmetic: How residuals are added.
        mailbox: Where a device tells of faults and drift.
        ahead: What prepares couplings before their turn, if anything does.
    """

    def __init__(
        self,
        names: Sequence[str],
        keep: Keep,
        arithmetic: Arithmetic,
        mailbox: Mailbox,
        ahead: Overlap | None = None,
    ) -> None:
        self.names = names
        self.ahead = ahead
        self.arithmetic = arithmetic
        self._keep = keep
        self._mailbox = mailbox
        self._next = 0  # the coupling whose turn it is in the forward
        self._handed_on: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._faults: list[Tensor] = []
        self._handed: dict[int, Streams] = {}  # in the backward: an output, by its coupling
        self._lent: Streams | None = None  # what a coupling that is prepared ahead is made from
        self._drift: Drift | None = None

    def enter(self, streams: Streams, *, drift_tolerance: float | None) -> Streams:
        """Bring the streams into the row's arithmetic; given a tolerance, watch them for drift."""
        self.dtype = streams[0].dtype
        stored = [self.arithmetic.store(x) for x in streams]
        self._stored = (stored[0].stored, stored[1].stored)
        a, b = (self.real(each.stored) for each in stored)
        if drift_tolerance is not None:
            self._drift = Drift((a, b), drift_tolerance, self.names[0], self._mailbox)
        for value, x, (_, fault) in zip((a, b), streams, stored, strict=True):
            self._note_fault(self.names[0], fault, value, x)
        return _straight_through(a, streams[0]), _straight_through(b, streams[1])

    def couple(self, coupling: Coupling, a: Tensor, b: Tensor, side: dict[str, Any]) -> Streams:
        """Run the coupling whose turn it is."""
        if self._handed_on not in (None, (_mark(a), _mark(b))):
            raise UnitError(
                "its streams are not those that the coupling before it gave: a hook changed them; "
                "hooks on couplings may look, and a junction may change"
            )
        name, exact = self.names[self._next], self.arithmetic.exact
        if self._keep == "nothing":
            call, tensors = Call.split(coupling.f, (a,), side)
            c, a = _KeptNothing(self, self._next, call).apply([b, *tensors])
        else:
            # A view of its own sums f's gradients for `a` before they meet the other stream's, as
            # recovery does: then both are equal to the last bit.
            r = (
                keep_input(name, coupling.f, (a,), side, exact=exact, ahead=self.ahead)
                if self._keep == "input"
                else coupling.residual(a.view_as(a), side)
            )
            c = _straight_through(self.advance(verify_residual(r, a)), b, r)
        self._next += 1
        self._handed_on = (_mark(c), _mark(a))
        return self._end(c, a) if self._next == len(self.names) else (c, a)

    def advance(self, r: Tensor) -> Tensor:
        """Add the residual of the coupling whose turn it is; return the new stream's real form."""
        a, b = self._stored
        c, fault = self.arithmetic.add(b, r)
        self._stored = (c, a)
        value = self.real(c)
        self._note_fault(self.names[self._next], fault, value, r)
        return value

    def kept(self, index: int) -> Sequence[Tensor]:
        """What this coupling must save of its output: all of it if it is the last, else nothing."""
        return self._stored if index == len(self.names) - 1 else ()

    def real(self, stored: Tensor) -> Tensor:
        """The real form of a stream of this row."""
        return self.arithmetic.real(stored, self.dtype)

    def verify_complete(self) -> None:
        """After the forward: every coupling must have run in this row."""
        if self._next != len(self.names):
            raise UnitError(
                "a forward pre-hook on a coupling took arguments away: in a chain it is given the "
                "streams and one argument more, and must return both, or None"
            )

    def hand_back(self, index: int, streams: Streams) -> None:
        """In the backward: give the input of this coupling to the one before, as its output."""
        if index == 0 and self._drift is not None:
            self._drift.compare((self.real(streams[0]), self.real(streams[1])))
        self._handed = {index - 1: streams} if index else {}  # last, so that it can be tried again

    def take_back(self, index: int) -> Streams:
        """In the backward: the output of this coupling, as recovered by the next one."""
        if index not in self._handed:
            raise RuntimeError(
                f"{self.names[index]}: its output reached the loss, but the chain's own output did "
                "not, and only from there can it be rebuilt; include the chain's output in the "
                'loss, or use backward="checkpoint"'
            )
        return self._handed[index]

    def lend(self, streams: Streams) -> None:
        """Hold the output of a coupling that another CUDA stream reads, until the next one is."""
        self._lent = streams if self.ahead is not None else None

    def let_go(self, index: int) -> None:
        """In the backward: this coupling is done; if it has handed nothing on, so is the row."""
        if self._handed.pop(index, None) is not None or index == 0:
            self._lent = None

    def wants_input(self, index: int, requires_grad: bool) -> bool:
        """Whether anyone will ask for the recovered input of this coupling."""
        return requires_grad if index else self._drift is not None

    def _note_fault(self, name: str, fault: Tensor | None, value: Tensor, x: Tensor) -> None:
        if fault is None:
            return
        if fault.device.type == "cpu":
            if fault:
                finite = bool(torch.isfinite(x).all())
                raise (_overflow if finite else _not_finite)(name, self.arithmetic)
        else:  # without waiting for the device: the stream becomes NaN, and the host will hear
            value.masked_fill_(fault, torch.nan)
            self._faults.append(fault)

    def _end(self, c: Tensor, a: Tensor) -> Streams:
        del self._stored
        if not self._faults:
            return c, a
        faults, self._faults = torch.stack(self._faults), []
        self._mailbox.post(faults, self._read_faults)
        return _poisoned(c, faults.any()), _poisoned(a, faults.any())

    def _read_faults(self, faults: Tensor) -> None:
        if faults.any():  # the first two are of the input's streams
            index = max(0, int(faults.to(torch.uint8).argmax()) - 2)
            raise _overflow(self.names[index], self.arithmetic)


def _mark(x: Tensor) -> tuple[int, int]:
    """Tells whether a tensor is the same memory, unchanged, whatever view of it this is."""
    return x.untyped_storage().data_ptr(), 0 if x.is_inference() else x._version


def prepare_streams(streams: Any) -> Streams:
    """Verify a pair of streams; under autocast make them float32, as only f should be narrower.

    A stem under autocast gives half precision, in which adding up residuals would lose too much.
    """
    a, b = verify_streams(streams)
    if is_autocast_enabled(a.device) and a.dtype == torch.get_autocast_dtype(a.device.type):
        a, b = a.float(), b.float()
    return _ordered(a), _ordered(b)


def _ordered(x: Tensor) -> Tensor:
    """A stream whose dimensions have an order in memory, which an expanded one leaves open.

    Random numbers are drawn in that order, so one that is rebuilt would get other masks.
    """
    if torch.compiler.is_compiling() or x.layout is not torch.strided:
        return x
    strides = [step for step, num in zip(x.stride(), x.shape, strict=True) if num > 1]
    return x.clone() if 0 in strides or len(set(strides)) < len(strides) else x


class _KeptNothing(Kept):
    """A coupling that recovers its input from its output."""

    def __init__(self, row: Row, index: int, call: Call) -> None:
        self.name = row.names[index]
        self.ahead = row.ahead
        self.is_compiled = call.is_compiled
        self._row = row
        self._index = index
        self._call = call
        self._record: Record

    def flows(self, grads: Sequence[Tensor | None]) -> bool:
        return grads[0] is not None

    def precedes(self, other: Kept) -> bool:
        follows = isinstance(other, _KeptNothing) and other._row is self._row
        return follows and other._index == self._index + 1  # type: ignore[attr-defined]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        _, a, *others = tensors
        exact = self._row.arithmetic.exact
        r, self._record = self._call.first_run(tensors[1:], with_graph=exact)
        c = self._row.advance(verify_residual(r, a))
        return (c, a.detach()), (*others, *self._row.kept(self._index))

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> Recovered | None:
        row, num_others = self._row, len(needs) - 2
        others, kept = saved[:num_others], saved[num_others:]
        c, a = kept if kept else row.take_back(self._index)
        row.lend((c, a))
        recovers = row.wants_input(self._index, needs[0] or needs[1])
        if not flows:
            if not recovers:
                return None
            if not row.arithmetic.exact:  # which needs the kernels of the forward
                needs = [False] * len(needs)
        recovered = recover(
            self._call,
            c if recovers else None,
            [row.real(a), *others],
            needs[1:],
            self._record,
            row.arithmetic,
        )
        if recovered.b is not None:
            row.hand_back(self._index, (a, recovered.b))
        return recovered

    def finish(
        self, prepared: Recovered | None, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        dc, da = grads
        self._row.let_go(self._index)
        if prepared is None or dc is None:
            return [None, da, *[None] * (len(needs) - 2)]
        da, db, *rest = prepared.pull_back(dc, da)
        return [db, da, *rest]


class _Poisoned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Tensor) -> Tensor:
        ctx.fault = fault
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return (None if grad is None else grad.masked_fill(ctx.fault, torch.nan)), None


def _poisoned(x: Tensor, fault: Tensor) -> Tensor:
    """`x`, whose gradient is not a number after a fault: better than one of wrong numbers."""
    result: Tensor = _Poisoned.apply(x, fault)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor) -> Tensor:
        ctx.dtypes = [source.dtype for source in sources]
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *(grad if grad is None else grad.to(dtype) for dtype in ctx.dtypes))


def _straight_through(value: Tensor, *sources: Tensor) -> Tensor:
    """`value`, whose gradient goes to each of the sources it was added up from."""
    result: Tensor = _StraightThrough.apply(value, *sources)  # type: ignore[no-untyped-call]
    return result


def _overflow(name: str, arithmetic: Arithmetic) -> ArithmeticError:
    return OverflowError(
        f"{name}: a stream left the range of {arithmetic}, or f gave a value that is not finite; "
        "normalise inside f, or use a grid of fewer bits"
    )


def _not_finite(name: str, arithmetic: Arithmetic) -> ArithmeticError:
    return FloatingPointError(f"{name}: f or the input of the row gave a value that is not finite")
