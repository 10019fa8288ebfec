"""Transport of micro-batches: into a pipeline, and between its stages.

A tick calls it in this order, whatever moves the messages:

    enter                             a new micro-batch, before the tick
    begin_tick
      fetch, run a stage, deliver     for every action of a group
      exchange                        after the group; then stages compute what is not sent
      average                         gradients over replicas, before the updates
    report                            the loss, after the tick
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.runners.captured_messages import CapturedMessages, Source
from redivider.pipeline.runners.in_flight import InFlight
from redivider.pipeline.runners.replicas import Shares
from redivider.pipeline.schedule import Direction
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.message import Flow, Message
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.tick import Tick
from redivider.replay.autocast import Autocast
from redivider.tree import tensors_of


def _kind(x: Any) -> str:
    is_array = hasattr(x, "__array__")
    return type(x).__name__ + ("; torch.from_numpy makes one" if is_array else "")


class TickTransport(ABC):
    """Movement of messages in a tick.

    Args:
        in_flight: Inboxes of the stages, and counters.
        packing: How messages between stages are packed.
        own: Stages of this process; all by default.
    """

    def __init__(self, in_flight: InFlight, packing: Packing, own: range | None = None) -> None:
        self.in_flight, self._packing = in_flight, packing
        num_stages = in_flight.schedule.num_stages
        self.own = range(num_stages) if own is None else own
        """Stages of this process."""
        self.is_spread = len(self.own) < num_stages
        """Whether other processes hold stages."""

    @property
    def sources(self) -> list[Source]:
        """Sources of the messages that come into this process, with micro-batches that enter."""
        sources: list[Source] = [("up", self.own[0])]
        if self.own[-1] < self.in_flight.schedule.num_stages - 1:
            sources.append(("down", self.own[-1]))
        return sources

    def is_urgent(self, stage: int) -> bool:
        """Return whether another process waits for the gradients that a stage sends."""
        schedule = self.in_flight.schedule
        return stage == self.own[0] and self.is_spread and schedule.is_tight(stage)

    @abstractmethod
    def begin_tick(self) -> None:
        """Prepare for the messages of a tick."""

    @abstractmethod
    def norms(self, stages: Sequence[Stage]) -> list[Tensor]:
        """Return the gradient norms of all stages at their last updates."""

    @abstractmethod
    def fetch(self, direction: Direction, stage: int, n: int) -> Message:
        """Return the message of a micro-batch for a stage, and remove it from its inbox."""

    @abstractmethod
    def deliver(self, direction: Direction, stage: int, message: Message) -> None:
        """Deliver a message to a stage."""

    @abstractmethod
    def forget(self, stage: int, n: int) -> None:
        """Forget a micro-batch whose backward is done in a stage."""

    @abstractmethod
    def exchange(self, t: int, group: int) -> None:
        """Exchange the messages of a group of actions of tick t, before the updates."""

    @abstractmethod
    def average(self, stages: Sequence[Stage]) -> None:
        """Average what replicas of stages share, before these are updated."""

    @abstractmethod
    def report(self, tick: Tick, t: int) -> Tick:
        """Return the result of tick t as this process reports it."""

    def _put(self, direction: Direction, stage: int, message: Message) -> None:
        """Put a message into the inbox of a stage that is here, as if it had travelled."""
        inbox = self.in_flight.inbox(direction, stage)
        inbox[message.microbatch] = message.rounded(self._packing)


class Transport(TickTransport):
    """Movement of a pipeline's messages: in ticks, and into the pipeline before them."""

    max_leaving = 0
    """Messages to other processes that may be on their way, at most."""
    shares_norms = False
    """Whether processes exchange gradient norms in every tick."""
    has_replicas = False
    """Whether other processes train the same stages."""

    def average_shares(self, shares: Sequence[Shares]) -> None:
        """Average what replicas share, of which a recorded tick has noted where it lies."""

    @abstractmethod
    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> Message | None:
        """Put a new micro-batch into the first inbox; return its message, if that is here."""

    def withdraw(self) -> bool:
        """Take back the micro-batch that entered last; return False if others know of it."""
        return False

    @abstractmethod
    def contexts(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        """Return the side inputs and the autocast settings of every micro-batch in flight."""

    def targets(self) -> dict[int, Any]:
        """Return the targets of the micro-batches whose loss has not been computed."""
        inboxes = self.in_flight.up
        return {n: message.target for inbox in inboxes for n, message in inbox.items()}

    @abstractmethod
    def capture(self, entering: Message, num_phases: int, device: torch.device) -> CapturedMessages:
        """Allocate the memory from which captured ticks read messages."""


class InProcess(Transport):
    """Transport within one process: every inbox is here."""

    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> Message | None:
        tensors = tensors_of(x)
        if not tensors:
            raise TypeError(f"a step needs a tensor, or a structure of some, got {_kind(x)}")
        message = Message(n, Flow(x), Autocast(tensors[0].device), side, target)
        self.in_flight.up[0][n] = message
        return message

    def withdraw(self) -> bool:
        self.in_flight.entered -= 1
        return True

    def contexts(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        inboxes = (*self.in_flight.up, *self.in_flight.down)
        return {n: (m.side, m.autocast) for inbox in inboxes for n, m in inbox.items()}

    def capture(self, entering: Message, num_phases: int, device: torch.device) -> CapturedMessages:
        return CapturedMessages(entering, num_phases, device)

    def begin_tick(self) -> None:
        pass

    def norms(self, stages: Sequence[Stage]) -> list[Tensor]:
        return [stage.norm for stage in stages]

    def fetch(self, direction: Direction, stage: int, n: int) -> Message:
        return self.in_flight.inbox(direction, stage).pop(n)

    def deliver(self, direction: Direction, stage: int, message: Message) -> None:
        self._put(direction, stage, message)

    def forget(self, stage: int, n: int) -> None:
        pass

    def exchange(self, t: int, group: int) -> None:
        pass

    def average(self, stages: Sequence[Stage]) -> None:
        pass

    def report(self, tick: Tick, t: int) -> Tick:
        return tick
