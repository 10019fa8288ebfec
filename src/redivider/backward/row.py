"""Row: consecutive couplings, which share the memory of one pair of streams.

In the forward every coupling hands its output to the next and keeps nothing; the last one keeps its
output. In the backward every coupling recovers its input and hands it to the one before:

    forward    (a, b) --> coupling 0 --> coupling 1 --> ... --> coupling n-1 --> (c, a), kept
    backward   (a, b) <-- coupling 0 <-- coupling 1 <-- ... <-- coupling n-1 <--

Couplings of a row may differ in what they keep. Then every run of couplings that keep nothing does
the above: its last coupling, the top, keeps its output. Its first one is the bottom.

Beside the tensors that autograd sees, couplings hand on the stored form of the streams
(arithmetic.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redivider.arithmetic import Arithmetic
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import Kept, keep_input
from redivider.backward.recovery import Recovered, recover
from redivider.backward.strategy import Keeping
from redivider.coupling import Coupling, Streams, verify_residual, verify_streams
from redivider.errors import UnitError
from redivider.replay import Call, Record
from redivider.replay.autocast import is_autocast_enabled

if TYPE_CHECKING:
    from redivider.backward.drift import Drift


class Row:
    """Consecutive couplings of one forward pass and its backward, and the streams between them.

    Args:
        names: Index and name of every coupling, for errors.
        keepings: State that every coupling keeps between forward and backward.
        arithmetic: Arithmetic that adds the residuals.
        mailbox: Receiver of faults and drift from the device.
    """

    def __init__(
        self,
        names: Sequence[str],
        keepings: Sequence[Keeping],
        arithmetic: Arithmetic,
        mailbox: Mailbox,
    ) -> None:
        self.names = names
        self.keepings = keepings
        self.arithmetic = arithmetic
        self._mailbox = mailbox
        self._next = 0  # index of the coupling whose turn it is in the forward
        self._expected: tuple[tuple[int, int], tuple[int, int]] | None = None  # its streams
        self._faults: list[Tensor] = []
        self._outputs: dict[int, Streams] = {}  # in the backward: recovered outputs by coupling
        self._lent: Streams | None = None  # output from which a coupling is prepared ahead
        self._drift_tolerance: float | None = None
        self._drifts: dict[int, Drift] = {}  # by the bottom of a run

    def enter(self, streams: Streams, *, drift_tolerance: float | None) -> Streams:
        """Convert the streams to the row's arithmetic; with a tolerance, check them for drift."""
        self.dtype = streams[0].dtype
        stored = [self.arithmetic.store(x) for x in streams]
        self._stored = (stored[0].stored, stored[1].stored)
        a, b = (self.real(checked.stored) for checked in stored)
        self._drift_tolerance = drift_tolerance
        for value, x, (_, fault) in zip((a, b), streams, stored, strict=True):
            self._note_fault(self.names[0], fault, value, x)
        entered = _straight_through(a, streams[0]), _straight_through(b, streams[1])
        self._expected = (mark(entered[0]), mark(entered[1]))
        return entered

    def couple(self, coupling: Coupling, a: Tensor, b: Tensor, side: dict[str, Any]) -> Streams:
        """Run the coupling whose turn it is."""
        if self._expected != (mark(a), mark(b)):
            raise UnitError(
                "its streams are not those that the coupling before it gave: a hook changed them; "
                "a hook of a coupling may read them; to change them, use a junction"
            )
        name, exact = self.names[self._next], self.arithmetic.exact
        keeping = self.keepings[self._next]
        if keeping.keep == "nothing":
            if self._drift_tolerance is not None and self._is_bottom(self._next):
                from redivider.backward.drift import Drift  # one step in a hundred needs it

                drift = Drift((a, b), self._drift_tolerance, name, self._mailbox)
                self._drifts[self._next] = drift
            call, tensors = Call.split(coupling.f, (a,), side)
            c, a = _KeptNothing(self, self._next, call).apply([b, *tensors])
        else:
            # The view sums f's gradients for `a` before the other stream's gradient is added. That
            # is the order in recovery, so both strategies are equal to the last bit.
            if keeping.keep == "input":
                r = keep_input(name, coupling.f, (a,), side, keeping, exact=exact)
            elif keeping.run is not None:
                r = keeping.run(a.view_as(a), **side)
            else:
                r = coupling.residual(a.view_as(a), side)
            c = _straight_through(self.advance(verify_residual(r, a)), b, r)
        self._next += 1
        self._expected = (mark(c), mark(a))
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
        """Return the streams that this coupling must save: its output if it is a top."""
        is_top = index + 1 == len(self.names) or self.keepings[index + 1].keep != "nothing"
        return self._stored if is_top else ()

    def real(self, stored: Tensor) -> Tensor:
        """Return the real form of a stream of this row."""
        return self.arithmetic.real(stored, self.dtype)

    def verify_complete(self) -> None:
        """Verify after the forward that every coupling has run in this row."""
        if self._next != len(self.names):
            raise UnitError(
                "a coupling did not run as a part of its chain: a hook called its forward first, "
                "or it was traced; compile f"
            )

    def hand_back(self, index: int, streams: Streams) -> None:
        """Hand the recovered input of this coupling to the one before, as its output."""
        if index in self._drifts:
            self._drifts[index].compare((self.real(streams[0]), self.real(streams[1])))
            if self.keepings[index].ahead is None:  # else another CUDA stream may still read it
                del self._drifts[index]
        # Last, so that a comparison that raises can be tried again.
        self._outputs = {} if self._is_bottom(index) else {index - 1: streams}

    def take_back(self, index: int) -> Streams:
        """Return the output of this coupling, as the next one has recovered it."""
        if index not in self._outputs:
            raise RuntimeError(
                f"{self.names[index]}: its output reached the loss, but the chain's own output did "
                "not, and only from there can it be rebuilt; include the chain's output in the "
                'loss, or use backward="checkpoint"'
            )
        return self._outputs[index]

    def lend(self, index: int, streams: Streams) -> None:
        """Hold the output of a coupling, which another CUDA stream reads, until the next call."""
        self._lent = streams if self.keepings[index].ahead is not None else None

    def let_go(self, index: int) -> None:
        """Release the output of this coupling, whose backward is done."""
        # If its output was still here, it has handed nothing on, and the row is done.
        if self._outputs.pop(index, None) is not None or self._is_bottom(index):
            self._lent = None

    def wants_input(self, index: int, requires_grad: bool) -> bool:
        """Return whether the recovered input of this coupling will be used."""
        return index in self._drifts if self._is_bottom(index) else requires_grad

    def _is_bottom(self, index: int) -> bool:
        return index == 0 or self.keepings[index - 1].keep != "nothing"

    def _note_fault(self, name: str, fault: Tensor | None, value: Tensor, x: Tensor) -> None:
        if fault is None:
            return
        if fault.device.type == "cpu":
            if fault and not torch.isfinite(x).all():
                raise FloatingPointError(f"{name}: f or the input gave a value that is not finite")
            if fault:
                raise _overflow(name, self.arithmetic)
        else:  # do not wait for the device: poison the stream with NaN, and report later
            value.masked_fill_(fault, torch.nan)
            self._faults.append(fault)

    def _end(self, c: Tensor, a: Tensor) -> Streams:
        del self._stored
        if not self._faults:
            return c, a
        faults, self._faults = torch.stack(self._faults), []
        self._mailbox.post(faults, self._read_faults)
        return poisoned(c, faults.any()), poisoned(a, faults.any())

    def _read_faults(self, faults: Tensor) -> None:
        if faults.any():  # the first two flags belong to the streams that entered
            index = max(0, int(faults.to(torch.uint8).argmax()) - 2)
            raise _overflow(self.names[index], self.arithmetic)


def mark(x: Tensor) -> tuple[int, int]:
    """Identify the memory of a tensor and its version, the same for all views."""
    return x.untyped_storage().data_ptr(), 0 if x.is_inference() else x._version


def prepare_streams(streams: Any) -> Streams:
    """Verify a pair of streams; under autocast convert them to float32.

    A stem under autocast returns half precision, in which adding up residuals would lose too much.
    """
    a, b = verify_streams(streams)
    if is_autocast_enabled(a.device) and a.dtype == torch.get_autocast_dtype(a.device.type):
        a, b = a.float(), b.float()
    return _ordered(a), _ordered(b)


def _ordered(x: Tensor) -> Tensor:
    """Return a stream whose dimensions have an order in memory, which an expanded one has not.

    Random numbers are drawn in that order, so a rebuilt stream would get other dropout masks.
    """
    if torch.compiler.is_compiling() or x.layout is not torch.strided:
        return x
    strides = [step for step, num in zip(x.stride(), x.shape, strict=True) if num > 1]
    return x.clone() if 0 in strides or len(set(strides)) < len(strides) else x


class _KeptNothing(Kept):
    """State of a coupling that recovers its input from its output."""

    def __init__(self, row: Row, index: int, call: Call) -> None:
        self.name = row.names[index]
        keeping = row.keepings[index]
        self.ahead, self.saving = keeping.ahead, keeping.saving and keeping.saving(call)
        self.is_compiled = call.is_compiled
        self._row = row
        self._index = index
        self._call = call
        self._record: Record

    def flows(self, grads: Sequence[Tensor | None]) -> bool:
        return grads[0] is not None

    def precedes(self, other: Kept) -> bool:
        if not isinstance(other, _KeptNothing) or not super().precedes(other):
            return False
        return other._row is self._row and other._index == self._index + 1

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        _, a, *others = tensors
        exact = self._row.arithmetic.exact
        r, self._record = self._call.first_run(tensors[1:], with_graph=exact)
        c = self._row.advance(verify_residual(r, a))
        return (c, a.detach()), (*others, *self.take(), *self._row.kept(self._index))

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> Recovered | None:
        row, num_others = self._row, len(needs) - 2
        num_outputs = 0 if self.saving is None else self.saving.num_tensors
        others, rest = saved[:num_others], saved[num_others:]
        outputs, kept = rest[:num_outputs], rest[num_outputs:]
        c, a = kept if kept else row.take_back(self._index)
        row.lend(self._index, (c, a))
        recovers = row.wants_input(self._index, needs[0] or needs[1])
        if not (flows or recovers):
            return None
        # Exact recovery needs a graph, for the forward's kernels, as do outputs of operations.
        if not (flows or row.arithmetic.exact or outputs):
            needs = [False] * len(needs)
        recovered = recover(
            self._call,
            c if recovers else None,
            [row.real(a), *others],
            needs[1:],
            self._record,
            row.arithmetic,
            self.again(outputs),
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


def poisoned(x: Tensor, fault: Tensor) -> Tensor:
    """Return `x` with a gradient that becomes NaN after a fault, rather than wrong."""
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
    """Return `value` with a gradient that goes to all sources whose sum it is."""
    result: Tensor = _StraightThrough.apply(value, *sources)  # type: ignore[no-untyped-call]
    return result


def _overflow(name: str, arithmetic: Arithmetic) -> ArithmeticError:
    return OverflowError(
        f"{name}: a stream left the range of {arithmetic}, or f gave a value that is not finite; "
        "normalise inside f, or use a grid of fewer bits"
    )
