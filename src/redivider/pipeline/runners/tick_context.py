"""Context of a tick: where its actions run, and how it handles the loss and the learning rates.

A pipeline runs the same tick in two contexts. `EagerTick` runs it at once. `recording.Recording`
records it for a CUDA graph.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.stage import Stage

Kind: TypeAlias = Literal["F", "B", "U"]  # forward, backward, update


class TickContext(ABC):
    """Everything in a tick that depends on whether it runs at once or is recorded."""

    @abstractmethod
    def lane(self, kind: Kind, stage: int) -> AbstractContextManager[Any]:
        """Return the context in which a stage's forward, backward or update runs."""

    @abstractmethod
    def hold(self, message: Message) -> None:
        """Keep a message that was read for as long as its memory must not be used again."""

    @abstractmethod
    def guard(self, loss: Tensor, microbatch: int) -> None:
        """Prevent updates with a loss that is NaN or infinite."""

    @abstractmethod
    def set_rate(self, stage: Stage, factor: float) -> None:
        """Set a stage's learning rate before its update."""


class EagerTick(TickContext):
    """Context of a tick that runs at once, one action after the other."""

    def lane(self, kind: Kind, stage: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def hold(self, message: Message) -> None:
        pass

    def guard(self, loss: Tensor, microbatch: int) -> None:
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of micro-batch {microbatch} is {loss.item()}; no update was done with it"
            )

    def set_rate(self, stage: Stage, factor: float) -> None:
        stage.set_rate(factor)
