"""Tape: inputs of units that run again in the backward, compressed to a few bits a value.

Units that follow each other have similar inputs. The tape knows one input y, and keeps what has
to be added to come to the next one:

    forward    x0       x1             x2             x3
               y0 --+c1-> y1 ---+c2-> y2 ---+c3-> y3           y moves towards every input in turn
    backward   y0 <-c1-- y1 <--c2--- y2 <--c3--- y3            and back, by the same codes

Every code is the difference of an input and y, not of two inputs. So an error of one code is part
of the next difference, and errors do not add up. The forward computes with x, and is that of the
plain network; in the backward a unit is run again at y.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from redivider._torch_private import backward_keeps_graph
from redivider.backward.drift import compare_input
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import KeptInput
from redivider.backward.quantizer import Code, encode, move
from redivider.replay import Call, GraphRun
from redivider.strides import inverse, memory_order

BITS = 2  # for a value, unless another number is asked for


class Tape:
    """Inputs of one forward pass, of one shape and one order in memory.

    Args:
        bits: Bits for a value of an input.
        like: A tensor like the inputs.
    """

    def __init__(self, bits: int, like: Tensor) -> None:
        self._bits, self._dtype = bits, like.dtype
        # As in memory: there random numbers are drawn in that order, so dropout needs it again.
        self._order = memory_order(like)
        self._y: Tensor  # in that order
        self._position = -1  # of the input that y stands for
        self._codes: list[Code] = []  # from every input to the next
        self._needed: set[int] = set()  # positions that will be read

    @property
    def num_inputs(self) -> int:
        """Number of inputs, as long as none is released."""
        return len(self._codes) + (self._position >= 0)

    def append(self, x: Tensor) -> int:
        """Keep an input; return its position."""
        x = x.detach().permute(self._order)
        if self._position < 0:
            wide = torch.promote_types(x.dtype, torch.float32)
            self._y = x.to(wide, copy=True, memory_format=torch.contiguous_format)
        else:
            self._seek(len(self._codes))
            self._codes.append(encode(x, self._y, self._bits))
        self._position = len(self._codes)
        self._needed.add(self._position)
        return self._position

    def compare(self, x: Tensor, name: str, mailbox: Mailbox) -> None:
        """Compare what the tape knows of the last input with it."""
        compare_input(x.permute(self._order), self._y, name, mailbox)

    def read(self, position: int) -> Tensor:
        """Return what the tape knows of the input at a position."""
        self._seek(position)
        y = self._y
        if self._dtype == torch.float16:  # whose range a level beyond the input may leave
            largest = torch.finfo(self._dtype).max
            y = y.clamp(-largest, largest)
        y = y.to(self._dtype, copy=True)  # a copy, because the tape's own moves to other inputs
        return y.permute(inverse(self._order))

    def release(self, position: int) -> None:
        """Forget an input, and the codes beyond the last one that is needed."""
        self._needed.discard(position)
        while self._codes and len(self._codes) not in self._needed:
            self._seek(len(self._codes) - 1)
            self._codes.pop()

    def restart(self) -> "Tape":
        """Return a tape that begins with the input that this one knows, in the same memory."""
        other = copy(self)
        other._position, other._codes, other._needed = 0, [], {0}
        return other

    def _seek(self, position: int) -> None:
        while self._position > position:
            self._position -= 1
            move(self._y, self._codes[self._position], -1)
        while self._position < position:
            move(self._y, self._codes[self._position], 1)
            self._position += 1


class Tapes:
    """Tapes of one forward pass: one for the inputs of every shape.

    Args:
        bits: Bits for a value of an input.
    """

    def __init__(self, bits: int = BITS) -> None:
        self._bits = bits
        self._tapes: dict[Any, Tape] = {}
        self.mailbox: Mailbox | None = None
        """Receiver of warnings, in a pass whose inputs are compared with what is known of them."""

    def restart(self) -> "Tapes":
        """Return tapes that begin with the inputs that these ones know, in the same memory."""
        other = Tapes(self._bits)
        other._tapes = {kind: tape.restart() for kind, tape in self._tapes.items()}
        return other

    @property
    def num_inputs(self) -> int:
        """Number of inputs, as long as none is released."""
        return sum(tape.num_inputs for tape in self._tapes.values())

    @property
    def num_codes(self) -> int:
        """Number of inputs that are compressed, as long as none is released."""
        return self.num_inputs - len(self._tapes)

    def make_kept(self, name: str, call: Call, *, with_graph: bool, num_inputs: int) -> KeptInput:
        """Return the state of a module, whose input goes to a tape if it is one tensor."""
        if num_inputs != 1:
            return KeptInput(name, call, with_graph=with_graph)
        return KeptOnTape(self, name, call, with_graph=with_graph)

    def report_to(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def skip(self) -> None:
        """Do nothing: the tape goes on with the next input that is compressed."""

    def tape_for(self, x: Tensor) -> Tape | None:
        """Return the tape for an input; None for one that is not compressed, such as tokens."""
        if not x.is_floating_point():
            return None
        kind = x.shape, x.dtype, x.device, memory_order(x)
        if kind not in self._tapes:
            self._tapes[kind] = Tape(self._bits, x)
        return self._tapes[kind]


class KeptOnTape(KeptInput):
    """State of a module whose first tensor goes to a tape.

    Args:
        tapes: Tapes of the forward pass.
        name: Name of the module, for errors.
        call: Its call.
        with_graph: Build a graph in the first run, too.
    """

    def __init__(self, tapes: Tapes, name: str, call: Call, *, with_graph: bool) -> None:
        super().__init__(name, call, with_graph=with_graph)
        self.tapes: Tapes | None = tapes
        """Tapes of the forward pass, until its backward has used them."""
        self._tape: Tape | None = None
        self._position = -1

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if self.tapes is not None and any(tensor.requires_grad for tensor in tensors):
            self._tape = self.tapes.tape_for(tensors[0])
        if self._tape is None:
            return super().forward(tensors)
        self._position = self._tape.append(tensors[0])
        if self.tapes is not None and self.tapes.mailbox is not None:
            self._tape.compare(tensors[0], self.name, self.tapes.mailbox)
        outputs, saved = super().forward(tensors)
        return outputs, saved[1:]

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        if flows and self._position >= 0:
            if self._tape is None:
                raise RuntimeError(
                    "its input was released by a backward before; that one needs retain_graph=True"
                )
            saved = [self._tape.read(self._position), *saved]
        if not backward_keeps_graph():
            if self._tape is not None:
                self._tape.release(self._position)
            self.tapes = self._tape = None  # the caller may hold the loss, and with it the graph
        return super().prepare(saved, needs, flows=flows)
