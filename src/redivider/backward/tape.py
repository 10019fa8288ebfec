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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.backward.node import KeptInput
from redivider.backward.quantizer import Code, encode, move
from redivider.replay import Call, GraphRun

BITS = 2  # for a value, unless another number is asked for


class Tape:
    """Inputs of one forward pass, of one shape.

    Args:
        bits: Bits for a value of an input.
        like: A tensor like the inputs.
    """

    def __init__(self, bits: int, like: Tensor) -> None:
        self._bits = bits
        self._kind = _kind(like)
        self._y: Tensor
        self._position = -1  # of the input that y stands for
        self._codes: list[Code] = []  # from every input to the next

    def takes(self, x: Tensor) -> bool:
        """Return whether a tensor can be the next input."""
        return _kind(x) == self._kind

    def append(self, x: Tensor) -> int:
        """Keep an input; return its position."""
        x = x.detach()
        if self._position < 0:
            wide = torch.promote_types(x.dtype, torch.float32)
            self._y = x.to(wide, copy=True, memory_format=torch.contiguous_format)
        else:
            self._seek(len(self._codes))
            self._codes.append(encode(x, self._y, self._bits))
        self._position = len(self._codes)
        return self._position

    def read(self, position: int) -> Tensor:
        """Return what the tape knows of the input at a position."""
        self._seek(position)
        _, dtype, _ = self._kind
        return self._y.to(dtype, copy=True)  # y moves on

    def _seek(self, position: int) -> None:
        while self._position > position:
            self._position -= 1
            move(self._y, self._codes[self._position], -1)
        while self._position < position:
            move(self._y, self._codes[self._position], 1)
            self._position += 1


class Tapes:
    """Tapes of one forward pass of a chain: one for the inputs of every shape."""

    def __init__(self) -> None:
        self._tapes: dict[Any, Tape] = {}

    def make_kept(self, name: str, call: Call, *, with_graph: bool, num_inputs: int) -> KeptInput:
        """Return the state of a module, whose input goes to a tape if it is one tensor."""
        if num_inputs != 1:
            return KeptInput(name, call, with_graph=with_graph)
        return KeptOnTape(self._tape_for, name, call, with_graph=with_graph)

    def _tape_for(self, x: Tensor) -> Tape | None:
        if not x.is_floating_point():  # such as tokens
            return None
        return self._tapes.setdefault(_kind(x), Tape(BITS, x))


class KeptOnTape(KeptInput):
    """State of a module whose first tensor goes to a tape.

    Args:
        choose: Function that returns the tape for a tensor, or None to keep it as it is.
        name: Name of the module, for errors.
        call: Its call.
        with_graph: Build a graph in the first run, too.
    """

    def __init__(
        self, choose: Callable[[Tensor], Tape | None], name: str, call: Call, *, with_graph: bool
    ) -> None:
        super().__init__(name, call, with_graph=with_graph)
        self._choose = choose
        self._tape: Tape | None = None
        self._position: int

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if any(tensor.requires_grad for tensor in tensors):  # else there is no backward
            self._tape = self._choose(tensors[0])
        if self._tape is None:
            return super().forward(tensors)
        self._position = self._tape.append(tensors[0])
        outputs, saved = super().forward(tensors)
        return outputs, saved[1:]

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        if flows and self._tape is not None:
            saved = [self._tape.read(self._position), *saved]
        return super().prepare(saved, needs, flows=flows)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
