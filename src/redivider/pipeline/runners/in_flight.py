"""Micro-batches between their entry and their last backward, and the messages that carry them.

Messages wait in inboxes, by stage and then by micro-batch: upwards for a forward, downwards for a
backward.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from redivider.pipeline.schedule import Direction, Schedule
from redivider.pipeline.stages.message import Message

Inboxes: TypeAlias = list[dict[int, Message]]


@dataclass
class InFlight:
    """Counters and inboxes of a pipeline."""

    schedule: Schedule
    tick: int = 0
    """Ticks since the pipeline was last empty."""
    first: int = 0
    """Micro-batch that entered at tick 0."""
    entered: int = 0
    """Micro-batches that have entered since then."""
    up: Inboxes = field(init=False)
    down: Inboxes = field(init=False)

    def __post_init__(self) -> None:
        self.up = [{} for _ in range(self.schedule.num_stages)]
        self.down = [{} for _ in range(self.schedule.num_stages)]

    @property
    def next(self) -> int:
        """Micro-batch that enters next."""
        return self.first + self.entered

    @property
    def num(self) -> int:
        """Number of micro-batches that have entered and not left."""
        return self.entered - max(0, self.tick - self.schedule.num_in_flight)

    @property
    def num_ticks_left(self) -> int:
        """Ticks without new inputs until the pipeline is empty."""
        return max(0, self.schedule.num_ticks(self.entered) - self.tick)

    @property
    def oldest(self) -> int:
        """First micro-batch that has not left."""
        return self.next - self.num

    @property
    def oldest_without_loss(self) -> int:
        """First micro-batch whose loss has not been computed."""
        lag = self.schedule.lag("F", self.schedule.num_stages - 1)
        return self.first + max(0, self.tick - lag)

    def inbox(self, direction: Direction, stage: int) -> dict[int, Message]:
        """Return the messages that have arrived at a stage, by micro-batch."""
        return (self.up if direction == "up" else self.down)[stage]

    def restart(self) -> None:
        """Count ticks anew, when the pipeline is empty."""
        self.first, self.tick, self.entered = self.next, 0, 0
