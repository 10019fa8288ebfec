"""Order of the actions of a pipeline: the only place that knows it. No torch here.

At tick t, stage j of J runs the forward of micro-batch t - l j and the backward of micro-batch
t - l (2 (J-1) - j), where l is the latency: the ticks that a message travels between neighbours. In
the last stage both are the same micro-batch. For J = 3 and l = 1, stages down, ticks across:

    t        0     1     2     3     4     5
    stage 0  F0    F1    F2    F3    F4 B0 F5 B1
    stage 1        F0    F1    F2 B0 F3 B1 F4 B2
    stage 2              F0 B0 F1 B1 F2 B2 F3 B3

PETRA, algorithm 1 (Rivaud et al. 2025).

Where stages are in several processes, messages cross between them. Sender and receiver count a
message in the same tick, so that a backend may match messages by their order alone.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["F", "B"]
Direction: TypeAlias = Literal["up", "down"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Action(NamedTuple):
    """One stage's forward ("F") or backward ("B") of one micro-batch; prints and parses as F1.0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that `str` wrote."""
        match = re.fullmatch(r"([FB])(\d+)\.(\d+)", text)
        if match is None:
            raise ValueError(f"an action reads like F1.0 (stage 1, micro-batch 0), got {text!r}")
        kind, stage, microbatch = match.groups()
        return cls("F" if kind == "F" else "B", int(stage), int(microbatch))


class Leg(NamedTuple):
    """Message from one process to a stage of a neighbouring one."""

    direction: Direction
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """Order of the actions of a pipeline; ticks and micro-batches count from when it was empty.

    Args:
        num_stages: Number of stages.
        latency: Ticks that a message travels between neighbouring stages.
    """

    num_stages: int
    latency: int = 1

    def lag(self, kind: Kind, stage: int) -> int:
        """Return the ticks from a micro-batch's entry to its forward or backward in a stage."""
        return self.latency * (stage if kind == "F" else 2 * (self.num_stages - 1) - stage)

    def delay(self, stage: int) -> int:
        """Return the ticks between a stage's forward and its backward of the same micro-batch."""
        return self.lag("B", stage) - self.lag("F", stage)

    @property
    def num_in_flight(self) -> int:
        """Ticks until the first micro-batch has left, and micro-batches in a full pipeline."""
        return self.delay(0)

    def num_ticks(self, num_microbatches: int) -> int:
        """Return the ticks until everything that entered has left again."""
        return num_microbatches + self.num_in_flight if num_microbatches else 0

    def actions(self, tick: int, num_microbatches: int | None = None) -> tuple[Action, ...]:
        """Return the actions of a tick, stage by stage, forward before backward.

        Args:
            tick: The tick.
            num_microbatches: How many enter, one a tick; None for no end.
        """
        due = []
        for stage in range(self.num_stages):
            for kind in KINDS:
                microbatch = tick - self.lag(kind, stage)
                if microbatch >= 0 and (num_microbatches is None or microbatch < num_microbatches):
                    due.append(Action(kind, stage, microbatch))
        return tuple(due)

    def sent(self, tick: int, own: range, num_microbatches: int) -> list[Leg]:
        """Return the messages that a process sends in a tick, in the order of its actions.

        Args:
            tick: The tick.
            own: The stages of the process.
            num_microbatches: How many have entered.
        """
        legs = self._legs(tick, num_microbatches)
        return [leg for source, leg in legs if source in own and leg.stage not in own]

    def received(self, tick: int, own: range, num_microbatches: int) -> list[Leg]:
        """Return the messages sent to a process in a tick; it reads them `latency` ticks later."""
        legs = self._legs(tick, num_microbatches)
        return [leg for source, leg in legs if source not in own and leg.stage in own]

    def _legs(self, tick: int, num_microbatches: int) -> list[tuple[int, Leg]]:
        """Return all messages of a tick, each with the stage that sends it."""
        legs: list[tuple[int, Leg]] = []
        for kind, stage, microbatch in self.actions(tick, num_microbatches):
            if kind == "F" and stage + 1 < self.num_stages:
                legs.append((stage, Leg("up", stage + 1, microbatch)))
            elif kind == "B" and stage > 0:
                legs.append((stage, Leg("down", stage - 1, microbatch)))
        return legs
