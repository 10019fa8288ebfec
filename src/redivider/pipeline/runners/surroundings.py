"""What surrounds the actions of a tick."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from redivider.pipeline.stages.stage import Stage

Kind: TypeAlias = Literal["F", "B", "U"]


class Around:
    """The surroundings of a tick that runs at once; one that is recorded has others."""

    def lane(self, kind: Kind, stage: int) -> AbstractContextManager[Any]:
        """Where a stage's forward, backward or update goes."""
        return nullcontext()

    def guard(self, loss: Tensor, microbatch: int) -> None:
        """Stop at a loss that is not a number."""
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of micro-batch {microbatch} is {loss.item()}; no update was done with it"
            )

    def set_rate(self, stage: Stage, factor: float) -> None:
        """Set a stage's learning rate before its update."""
        stage.set_rate(factor)
