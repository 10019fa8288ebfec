"""Recovery of a coupling's input from its output: one evaluation of f, for inverse and gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redivider._torch_private import compiled_call
from redivider.arithmetic import Arithmetic
from redivider.replay import Call, GraphRun, Record


class Recovered(NamedTuple):
    """A coupling's input, recovered from its output by an evaluation of f that has its graph."""

    b: Tensor | None
    """The second input stream in stored form, if it was asked for."""
    run: GraphRun
    joined: bool = False
    """True if the gradient of `a` enters the run as well, and is added there."""

    @property
    def is_free(self) -> bool:
        """True if `pull_back` runs on the current CUDA stream, not on that of the run."""
        return self.run.is_free

    def pull_back(self, dc: Tensor | None, da: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of (a, b), then of f's other tensors, from those of (c, a)."""
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
    again: Callable[..., Any] | None = None,
) -> Recovered:
    """Evaluate f once, at `tensors` (`a` in its real form first), and undo its addition to `c`.

    `again` is called instead of f.
    """
    joint = getattr(compiled_call(call.module), "run_joint", None)
    if joint is None or arithmetic.exact:  # to the last bit: with the kernels of the forward
        run = call.rerun(tensors, needs, record, again)
        r = run.output
    else:
        run = call.rerun(tensors, needs, record, joint)
        r, run = run.without_first()
    b = None if c is None else arithmetic.subtract(c, r)
    return Recovered(b, run, joined=run.output is not r)
