"""Transport of a tick that is recorded.

A graph reads and writes the same memory at every replay. So messages that come into the process
arrive in fixed memory, or are copied there, before a part of the tick is replayed. Messages that
leave it are packed by the graph, and sent from its memory:

    bring | replay actions | send, exchange | replay updates | bring | ...

Replicas average their gradients before updates, between two parts as well. In one process nothing
leaves, and a tick has one part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from redivider.pipeline.runners.captured_messages import CapturedMessages, Source
from redivider.pipeline.runners.cuda_graphs import Replay
from redivider.pipeline.runners.in_flight import InFlight
from redivider.pipeline.runners.recording import Recording
from redivider.pipeline.runners.replicas import Shares
from redivider.pipeline.runners.transport import TickTransport
from redivider.pipeline.schedule import Direction
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.tick import Tick


@dataclass
class Part:
    """Part of a recorded tick, with the messages before and after it."""

    replay: Replay | None = None
    """Function that replays it; None if there is nothing to compute."""
    read: list[Source] = field(default_factory=list)
    """Sources of the messages that this part reads from outside of the process."""
    sent: list[tuple[Direction, list[Tensor]]] = field(default_factory=list)
    """Messages that leave the process after it, as they travel."""
    group: int | None = None
    """Group of actions that it ends, after which processes exchange messages."""
    averaged: list[Shares] = field(default_factory=list)
    """Tensors that replicas average after it, by stage."""


class RecordedTransport(TickTransport):
    """Transport of a tick that is recorded, in place of a pipeline's own.

    Args:
        in_flight: Inboxes of the stages, and counters.
        packing: How messages between stages are packed.
        own: Stages of this process.
        recording: Context of the tick.
        messages: Messages that come into the process, and those that leave it.
        norms: Fixed memory of the gradient norms of all stages, where processes exchange them.
        has_replicas: Whether other processes train the same stages.
    """

    def __init__(
        self,
        in_flight: InFlight,
        packing: Packing,
        own: range,
        recording: Recording,
        messages: CapturedMessages,
        norms: Tensor,
        *,
        has_replicas: bool,
    ) -> None:
        super().__init__(in_flight, packing, own)
        self._has_replicas = has_replicas
        self._recording, self._messages, self._norms = recording, messages, norms
        self._parts: list[Part] = []
        self._part = Part()

    def take_parts(self) -> list[Part]:
        """Return the parts of the recorded tick, when it ends."""
        self._end_part()
        parts, self._parts = self._parts, []
        return parts

    def fetch(self, direction: Direction, stage: int, n: int) -> Message:
        source = (direction, stage)
        if source not in self._messages.fixed:
            return self.in_flight.inbox(direction, stage).pop(n)
        self._part.read.append(source)
        # Its tensors may be in flight for several ticks, and a later message overwrites the memory.
        return self._messages.fixed[source][self._recording.phase].cloned(n)

    def deliver(self, direction: Direction, stage: int, message: Message) -> None:
        if stage in self.own:
            self._put(direction, stage, message)
        else:
            self._part.sent.append((direction, self._messages.pack(direction, message)))

    def exchange(self, t: int, group: int) -> None:
        if self.is_spread:
            self._part.group = group
            self._end_part()

    def average(self, stages: Sequence[Stage]) -> None:
        if not (self._has_replicas and stages):
            return
        for stage in stages:
            shares = Shares(stage.module)
            if not shares.are_complete:
                raise RuntimeError(
                    f"a parameter of stage {stage.index} has no gradient, and may have one in "
                    "another replica"
                )
            self._part.averaged.append(shares)
        self._end_part()

    def norms(self, stages: Sequence[Stage]) -> list[Tensor]:
        return list(self._norms) if self.is_spread else [stage.norm for stage in stages]

    def begin_tick(self) -> None:
        pass

    def forget(self, stage: int, n: int) -> None:
        pass

    def report(self, tick: Tick, t: int) -> Tick:
        return tick

    def _end_part(self) -> None:
        self._part.replay = self._recording.cut()
        self._parts.append(self._part)
        self._part = Part()
