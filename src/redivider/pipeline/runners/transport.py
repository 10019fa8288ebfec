"""Transport of micro-batches: into a pipeline, and between its stages.

A tick calls it in this order, whatever moves the messages:

    enter                             a new micro-batch, before the tick
    begin_tick
      fetch, run a stage, deliver     for every action of a group
      exchange                        after the group; then stages compute what is not sent
    share                             the loss, after the tick
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from redivider.pipeline.runners.in_flight import InFlight
from redivider.pipeline.runners.inputs import CallerTensors
from redivider.pipeline.schedule import Direction
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.message import Flow, Message
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.tick import Tick
from redivider.replay.autocast import Autocast
from redivider.tree import tensors_of

Source: TypeAlias = tuple[Direction, int]  # where messages come in: direction and stage


class Transport(ABC):
    """Movement of the messages of one pipeline.

    Args:
        in_flight: Inboxes of the stages, and counters.
        packing: How messages between stages are packed.
        caller_tensors: Record of the caller's tensors that are still needed.
    """

    def __init__(
        self, in_flight: InFlight, packing: Packing, caller_tensors: CallerTensors
    ) -> None:
        self._in_flight, self._packing = in_flight, packing
        self._caller_tensors = caller_tensors
        self.own = range(in_flight.schedule.num_stages)
        """Stages of this process."""
        self.is_direct = True
        """Whether messages to other processes leave from the device of the stages."""
        self.max_leaving = 0
        """Messages to other processes that may be on their way, at most."""
        self.shares_norms = False
        """Whether processes exchange gradient norms in every tick."""

    @property
    def is_spread(self) -> bool:
        """Whether other processes hold stages."""
        return len(self.own) < self._in_flight.schedule.num_stages

    @property
    def sources(self) -> list[Source]:
        """Where messages come into this process, micro-batches that enter included."""
        sources: list[Source] = [("up", self.own[0])]
        if self.own[-1] < self._in_flight.schedule.num_stages - 1:
            sources.append(("down", self.own[-1]))
        return sources

    def is_urgent(self, stage: int) -> bool:
        """Return whether another process waits for the gradients that a stage sends."""
        schedule = self._in_flight.schedule
        return stage == self.own[0] and self.is_spread and schedule.is_tight(stage)

    @abstractmethod
    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> Message | None:
        """Put a new micro-batch into the first inbox; return its message, if that is here."""

    @abstractmethod
    def deliver(self, direction: Direction, stage: int, message: Message) -> None:
        """Deliver a message to a stage."""

    @abstractmethod
    def fetch(self, direction: Direction, stage: int, n: int) -> Message:
        """Return the message of a micro-batch for a stage, and remove it from its inbox."""

    def allocate(
        self, source: Source, entering: Message, num_phases: int, device: torch.device
    ) -> list[Message]:
        """Return memory for the messages of a source that captured ticks read, for each phase.

        Args:
            source: Where the messages come in.
            entering: Micro-batch that enters, with as much of it as this process has.
            num_phases: Number of phases. They may share memory.
            device: Device of the stages.
        """
        return [entering.mapped(partial(torch.zeros_like, device=device), 0)] * num_phases

    def bring(self, source: Source, n: int, fixed: Message, phase: int) -> None:
        """Bring the message of a micro-batch to the memory from which a phase reads it."""
        copy_tensors(self.fetch(*source, n).contents, fixed.contents)

    @abstractmethod
    def begin_rotation(self) -> None:
        """Let messages arrive where captured ticks read them, beginning with the first phase."""

    @abstractmethod
    def end_rotation(self) -> None:
        """Let every message arrive in memory of its own again."""

    def pack(self, direction: Direction, message: Message) -> list[Tensor]:
        """Return the bytes of a message to another process."""
        raise NotImplementedError("no stage is in another process")

    def send_packed(self, direction: Direction, data: list[Tensor]) -> None:
        """Send the bytes of a message to another process."""
        raise NotImplementedError("no stage is in another process")

    @abstractmethod
    def contexts(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        """Return the side inputs and the autocast settings of every micro-batch in flight."""

    @abstractmethod
    def norms(self, stages: Sequence[Stage]) -> list[Tensor]:
        """Return the gradient norms of all stages at their last updates."""

    @abstractmethod
    def begin_tick(self) -> None:
        """Prepare for the messages of a tick."""

    @abstractmethod
    def forget(self, stage: int, n: int) -> None:
        """Forget a micro-batch whose backward is done in a stage."""

    @abstractmethod
    def exchange(self, t: int, group: int) -> None:
        """Exchange the messages of a group of actions of tick t, before the updates."""

    @abstractmethod
    def share(self, tick: Tick, t: int) -> Tick:
        """Return the result of tick t as this process reports it."""

    def targets(self) -> dict[int, Any]:
        """Return the targets of the micro-batches whose loss has not been computed."""
        inboxes = self._in_flight.up
        return {n: message.target for inbox in inboxes for n, message in inbox.items()}

    def _put(self, direction: Direction, stage: int, message: Message) -> None:
        """Put a message into the inbox of a stage that is here, as if it had travelled."""
        inbox = self._in_flight.inbox(direction, stage)
        inbox[message.microbatch] = message.rounded(self._packing)


def copy_tensors(source: Any, target: Any) -> None:
    """Copy the tensors of a tree to those of another tree of the same form."""
    for leaf, fixed in zip(tree_leaves(source), tree_leaves(target), strict=True):
        if isinstance(leaf, Tensor):
            fixed.copy_(leaf.detach(), non_blocking=True)


class InProcess(Transport):
    """Transport within one process: every inbox is here."""

    def enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> Message | None:
        tensors = tensors_of(x)
        if not tensors:
            raise TypeError(f"a step needs a tensor, or a structure of some, got {x!r}")
        self._caller_tensors.note(n, (x, side), target)
        message = Message(n, Flow(x), Autocast(tensors[0].device), side, target)
        self._in_flight.up[0][n] = message
        return message

    def deliver(self, direction: Direction, stage: int, message: Message) -> None:
        self._put(direction, stage, message)

    def fetch(self, direction: Direction, stage: int, n: int) -> Message:
        return self._in_flight.inbox(direction, stage).pop(n)

    def begin_rotation(self) -> None:
        pass

    def end_rotation(self) -> None:
        pass

    def contexts(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        inboxes = (*self._in_flight.up, *self._in_flight.down)
        return {n: (m.side, m.autocast) for inbox in inboxes for n, m in inbox.items()}

    def norms(self, stages: Sequence[Stage]) -> list[Tensor]:
        return [stage.norm for stage in stages]

    def begin_tick(self) -> None:
        pass

    def forget(self, stage: int, n: int) -> None:
        pass

    def exchange(self, t: int, group: int) -> None:
        pass

    def share(self, tick: Tick, t: int) -> Tick:
        return tick
