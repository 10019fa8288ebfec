"""Who does what at tick t: the only place that knows the order. No torch here.

Stage j of J forwards micro-batch t - l j and takes back micro-batch t - l (2 (J-1) - j), where l is
the latency: the ticks that a message travels between neighbours. In the last stage both are the
same micro-batch. For J = 3 and l = 1, stages down, ticks across:

    t        0     1     2     3     4     5
    stage 0  F0    F1    F2    F3    F4 B0 F5 B1
    stage 1        F0    F1    F2 B0 F3 B1 F4 B2
    stage 2              F0 B0 F1 B1 F2 B2 F3 B3

PETRA, algorithm 1 (Rivaud et al. 2025).

Where stages are in several processes, messages cross between them. Sender and receiver count a
message in the same tick, so that a backend may match messages by their order alone.
"""

import re
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["F", "B"]
Way: TypeAlias = Literal["up", "down"]
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
        """Read what `str` wrote."""
        match = re.fullmatch(r"([FB])(\d+)\.(\d+)", text)
        if match is None:
            raise ValueError(f"an action reads like F1.0 (stage 1, micro-batch 0), got {text!r}")
        kind, stage, microbatch = match.groups()
        return cls("F" if kind == "F" else "B", int(stage), int(microbatch))


def actions(
    t: int, stages: int, latency: int = 1, num_microbatches: int | None = None
) -> tuple[Action, ...]:
    """What happens at tick t, stage by stage, forward before backward.

    Args:
        t: The tick, counted since the pipeline was empty.
        stages: Number of stages.
        latency: Ticks that a message travels.
        num_microbatches: How many enter, one a tick; without it they never end.
    """
    found = []
    for stage in range(stages):
        for kind in KINDS:
            microbatch = t - lag(kind, stage, stages, latency)
            if microbatch >= 0 and (num_microbatches is None or microbatch < num_microbatches):
                found.append(Action(kind, stage, microbatch))
    return tuple(found)


def lag(kind: Kind, stage: int, stages: int, latency: int = 1) -> int:
    """Ticks from when a micro-batch enters to when a stage forwards it, or takes it back."""
    return latency * (stage if kind == "F" else 2 * (stages - 1) - stage)


def delay(stage: int, stages: int, latency: int = 1) -> int:
    """Ticks between a stage's forward and its backward of the same micro-batch."""
    return lag("B", stage, stages, latency) - lag("F", stage, stages, latency)


def num_ticks(num_microbatches: int, stages: int, latency: int = 1) -> int:
    """Ticks until everything that entered has left again."""
    return num_microbatches + delay(0, stages, latency) if num_microbatches else 0


class Leg(NamedTuple):
    """Message from one process to a stage of a neighbouring one."""

    way: Way
    stage: int
    microbatch: int


def sent(t: int, own: range, stages: int, latency: int, num_microbatches: int) -> list[Leg]:
    """Return the messages that a process sends in a tick, in the order of its actions.

    Args:
        t: The tick, counted since the pipeline was empty, as micro-batches are.
        own: The stages of the process.
        stages: Number of stages.
        latency: Ticks that a message travels.
        num_microbatches: How many have entered.
    """
    legs = _legs(t, stages, latency, num_microbatches)
    return [leg for source, leg in legs if source in own and leg.stage not in own]


def received(t: int, own: range, stages: int, latency: int, num_microbatches: int) -> list[Leg]:
    """Return the messages that are sent to a process in a tick; it reads them `latency` later."""
    legs = _legs(t, stages, latency, num_microbatches)
    return [leg for source, leg in legs if source not in own and leg.stage in own]


def _legs(t: int, stages: int, latency: int, num_microbatches: int) -> list[tuple[int, Leg]]:
    """Return all messages of a tick, each with the stage that sends it."""
    legs: list[tuple[int, Leg]] = []
    for kind, stage, microbatch in actions(t, stages, latency, num_microbatches):
        if kind == "F" and stage + 1 < stages:
            legs.append((stage, Leg("up", stage + 1, microbatch)))
        elif kind == "B" and stage > 0:
            legs.append((stage, Leg("down", stage - 1, microbatch)))
    return legs
