"""Messages of captured ticks between processes.

Over backends that match by order, messages of a neighbour arrive in the memory from which graphs
read them, one phase after the other (`Incoming.rotate`). Over gloo they are copied there, because
they pass through memory of the host, or their receives are posted far ahead. Packed messages are
unpacked into other memory, and copied there as well.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redivider.pipeline.runners.captured_messages import (
    ENTRY,
    CapturedMessages,
    Source,
    copy_tensors,
)
from redivider.pipeline.runners.wire import Buffers
from redivider.pipeline.schedule import Direction
from redivider.pipeline.stages.message import Message
from redivider.tree import map_tensors

if TYPE_CHECKING:
    from redivider.pipeline.runners.process_transport import BetweenProcesses


class CapturedMail(CapturedMessages):
    """Memory of the messages that come into a process of several, and sends of those that leave.

    Args:
        transport: Transport of the process.
        entering: Micro-batch that enters, with as much of it as this process has.
        num_phases: Number of ticks that are captured.
        device: Device of the stages.
    """

    def __init__(
        self,
        transport: "BetweenProcesses",
        entering: Message,
        num_phases: int,
        device: torch.device,
    ) -> None:
        self._transport, self._mail = transport, transport.mail
        self._rotations: dict[Source, list[Buffers]] = {}
        self.fixed = {}
        for source in transport.sources:
            if source == ENTRY:
                self._allocate(source, entering, num_phases, device)
            else:
                self._receive_into(source, entering, num_phases, device)

    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> None:
        # Later ticks read them.
        side, target = map_tensors(Tensor.clone, (side, target))
        self._transport.enter(n, x, target, side)

    def bring(self, source: Source, n: int, phase: int) -> None:
        (direction, stage), fixed = source, self.fixed[source][phase]
        transport = self._transport
        is_here = n in transport.in_flight.inbox(direction, stage)  # since before the capture
        if source not in self._rotations or is_here:
            copy_tensors(transport.fetch(direction, stage, n).contents, fixed.contents)
            return
        self._mail.take_into(direction, self._rotations[source][phase])
        if direction == "down":
            copy_tensors(transport.side_of(n), fixed.side)
        else:
            transport.note_side(n, map_tensors(Tensor.clone, fixed.side))
            copy_tensors(transport.take_target(n), fixed.target)

    def begin(self) -> None:
        for (direction, stage), buffers in self._rotations.items():
            num_read = len(self._transport.in_flight.inbox(direction, stage))
            self._mail.incoming[direction].rotate(buffers, num_read)

    def end(self) -> None:
        for line in self._mail.incoming.values():
            line.stop_rotating()

    def pack(self, direction: Direction, message: Message) -> list[Tensor]:
        return self._mail.pack(direction, message)

    def send(self, direction: Direction, data: list[Tensor]) -> None:
        self._mail.send_packed(direction, data)

    def _receive_into(
        self, source: Source, entering: Message, num_phases: int, device: torch.device
    ) -> None:
        """Allocate memory for the messages of a neighbour."""
        direction = source[0]
        arrives_there = self._transport.matches_by_order and not self._mail.is_packed
        zeros = partial(map_tensors, partial(torch.zeros_like, device=device))
        messages, rotation = [], []
        for _ in range(num_phases if arrives_there else 1):
            buffers, (flow, grads, side) = self._mail.allocate(direction)
            if direction == "down":  # they do not travel; those of all micro-batches are alike
                oldest = min(self._transport.contexts())  # those of later ones may be on their way
                side = zeros(self._transport.side_of(oldest))
            target = zeros(entering.target)
            messages.append(Message(0, flow, entering.autocast, side, target, grads))
            rotation.append(buffers)
        if arrives_there:
            self.fixed[source], self._rotations[source] = messages, rotation
        else:
            self._allocate(source, messages[0], num_phases, device)
