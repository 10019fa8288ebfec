"""Messages of captured ticks, into a process and out of it.

A graph reads the same memory at every replay. So everything that comes into the process is brought
to that memory first: in one process the inputs, which are copied. captured_mail.py adds the
messages of other processes.
"""

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from redivider.pipeline.schedule import Direction
from redivider.pipeline.stages.message import Message
from redivider.tree import tensors_of

Source: TypeAlias = tuple[Direction, int]  # where messages come in: direction and stage
ENTRY: Source = ("up", 0)  # where micro-batches come in


class CapturedMessages:
    """Memory of the inputs of captured ticks, in one process.

    Args:
        entering: Micro-batch that enters, with as much of it as this process has.
        num_phases: Number of ticks that are captured.
        device: Device of the stages.
    """

    def __init__(self, entering: Message, num_phases: int, device: torch.device) -> None:
        self.fixed: dict[Source, list[Message]] = {}
        """Memory of the messages that come in, for each phase; phases may share it."""
        self._allocate(ENTRY, entering, num_phases, device)

    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> None:
        """Copy or keep the arguments of a step, which the caller may overwrite after it."""
        message = self.fixed[ENTRY][0]
        copy_tensors((x, target, side), (message.flow.value, message.target, message.side))

    def bring(self, source: Source, n: int, phase: int) -> None:
        """Bring the message of a micro-batch to the memory from which a phase reads it."""

    def begin(self) -> None:
        """Let messages arrive where captured ticks read them, beginning with the first phase."""

    def end(self) -> None:
        """Let every message arrive in memory of its own again."""

    def pack(self, direction: Direction, message: Message) -> list[Tensor]:
        """Return the bytes of a message to another process."""
        raise NotImplementedError("no stage is in another process")

    def send(self, direction: Direction, data: list[Tensor]) -> None:
        """Send the bytes of a message to another process."""
        raise NotImplementedError("no stage is in another process")

    def _allocate(
        self, source: Source, like: Message, num_phases: int, device: torch.device
    ) -> None:
        """Allocate memory that all phases share, for messages that are copied into it."""
        fixed = like.mapped(partial(torch.zeros_like, device=device), 0)
        self.fixed[source] = [fixed] * num_phases


def copy_tensors(source: Any, target: Any) -> None:
    """Copy the tensors of a tree to those of another tree of the same form."""
    for tensor, fixed in zip(tensors_of(source), tensors_of(target), strict=True):
        fixed.copy_(tensor.detach(), non_blocking=True)
