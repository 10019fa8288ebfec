"""Tape: inputs of blocks that run again in the backward, compressed to a few bits a value.

Blocks that follow each other have similar inputs. The tape knows one input y, and keeps what has
to be added to come to the next one:

    forward    x0       x1             x2             x3
               y0 --+c1-> y1 ---+c2-> y2 ---+c3-> y3           y moves towards every input in turn
    backward   y0 <-c1-- y1 <--c2--- y2 <--c3--- y3            and back, by the same codes

Every code is the difference of an input and y, not of two inputs. So an error of one code is part
of the next difference, and errors do not add up. The forward computes with x, and is that of the
plain network; in the backward a block is run again at y.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from redivider.backward.node import KeptInput
from redivider.backward.quantizer import Code, encode, move
from redivider.replay import Call, GraphRun


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


def keep_on_tape(
    tape: Tape, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a block so that it keeps its first argument on a tape, and no graph.

    Args:
        tape: The tape.
        name: Name of the block, for errors.
        block: The block.
        args: Its arguments.
        kwargs: Its keywords.
    """
    call, tensors = Call.split(block, args, kwargs)
    kept = _KeptOnTape(tape, name, call)
    return kept.merge(kept.apply(tensors))


class _KeptOnTape(KeptInput):
    """State of a block whose first tensor is on a tape."""

    def __init__(self, tape: Tape, name: str, call: Call) -> None:
        # With the graph of the first run, gradients of what a block keeps inside are noticed.
        super().__init__(name, call, with_graph=True)
        self._tape = tape
        self._position: int
        self._leaves: list[Any]  # of the block's output, with None in the places of tensors
        self._is_tensor: list[bool]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        self._position = self._tape.append(tensors[0])
        output, self._record = self._call.first_run(tensors, with_graph=True)
        leaves, self.spec = tree_flatten(output)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)], tensors[1:]

    def merge(self, outputs: Sequence[Tensor]) -> Any:
        """Return the block's output, made of the tensors that autograd has seen."""
        following = iter(outputs)
        leaves = [
            next(following) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        if not flows:
            return None
        return super().prepare([self._tape.read(self._position), *saved], needs, flows=True)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
