"""Order of the actions of a pipeline: the only place that knows it. No torch here.

Micro-batch i enters at tick i. A tick has two slots, and a message travels h slots between
neighbouring stages: two for each tick of latency. Let c_j be the slots from stage 0 to stage j, and
c those to the last stage. Then stage j runs

    the forward of micro-batch i    in slot 2 i + c_j
    its backward                    in slot 2 i + 2 c - c_j + 1

so it has one action in every slot. The last stage runs forward, loss and backward in one slot. For
three stages, stages down, ticks across:

    latency 1    0     1     2     3     4     5        latency 0.5   0     1     2     3     4
    stage 0      F0    F1    F2    F3    F4 B0 F5 B1    stage 0       F0    F1    F2 B0 F3 B1 F4 B2
    stage 1            F0    F1    F2 B0 F3 B1 F4 B2    stage 1          F0    F1 B0 F2 B1 F3 B2 F4
    stage 2                  F0 B0 F1 B1 F2 B2 F3 B3    stage 2             F0 B0 F1 B1 F2 B2 F3 B3

Latency 1 is PETRA's algorithm 1 (Rivaud et al. 2025). At latency 0.5 gradients are half as late. A
stage updates after its backward, before its next forward. With whole latencies all updates come
after all actions of a tick. Else they also come between its two slots.

Where stages are in several processes, messages cross between them. Sender and receiver count a
message in the same slot, so that a backend may match messages by their order alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import inf
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["F", "B"]
Direction: TypeAlias = Literal["up", "down"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Latency: TypeAlias = int | float | tuple[int | float, ...]


class Action(NamedTuple):
    """One stage's forward ("F") or backward ("B") of one micro-batch; F1.0 is that of stage 1."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


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
        latency: Ticks that a message travels between neighbouring stages, a multiple of 0.5; or one
            number for every pair of neighbours.
    """

    num_stages: int
    latency: Latency = 1

    @cached_property
    def _slots_up(self) -> tuple[int, ...]:
        """Slots that a message travels from stage 0 to each stage."""
        latencies = self.latency
        if not isinstance(latencies, tuple):
            latencies = (latencies,) * (self.num_stages - 1)
        return tuple(accumulate((round(2 * latency) for latency in latencies), initial=0))

    @cached_property
    def num_groups(self) -> int:
        """Groups of actions in a tick, after each of which stages update."""
        return 2 if any(slots % 2 for slots in self._slots_up) else 1

    @cached_property
    def max_ticks(self) -> int:
        """Ticks from the one that sends a message to the one that reads it, at most."""
        forward, backward = ([self.lag(kind, j) for j in range(self.num_stages)] for kind in KINDS)
        ups = (above - below for below, above in pairwise(forward))
        downs = (below - above for below, above in pairwise(backward))
        return max([1, *ups, *downs])

    def slot(self, kind: Kind, stage: int) -> int:
        """Return the slots from a micro-batch's entry to its forward or backward in a stage."""
        up = self._slots_up
        if kind == "F" or stage == self.num_stages - 1:
            return up[stage]
        return 2 * up[-1] - up[stage] + 1

    def lag(self, kind: Kind, stage: int) -> int:
        """Return the ticks from a micro-batch's entry to its forward or backward in a stage."""
        return self.slot(kind, stage) // 2

    def delay(self, stage: int) -> int:
        """Return the backward passes of a stage between a micro-batch's forward and backward."""
        return self._slots_up[-1] - self._slots_up[stage]

    def runs_backward_first(self, stage: int) -> bool:
        """Return whether a stage runs its backward of a tick, and updates, before its forward."""
        return self.slot("B", stage) % 2 < self.slot("F", stage) % 2

    def is_read_at_once(self, direction: Direction, stage: int) -> bool:
        """Return whether a stage reads a message in the tick in which its neighbour sends it."""
        kind: Kind = "F" if direction == "up" else "B"
        sender = stage - 1 if direction == "up" else stage + 1
        return self.lag(kind, sender) == self.lag(kind, stage)

    def is_tight(self, stage: int) -> bool:
        """Return whether the stage below reads a message in the slot after it was sent."""
        return self._slots_up[stage] - self._slots_up[stage - 1] == 1 if stage else False

    def num_kept(self, stage: int) -> int:
        """Return the micro-batches between forward and backward in a stage, after a tick."""
        return self.lag("B", stage) - self.lag("F", stage)

    def num_waiting(self, direction: Direction, stage: int) -> int:
        """Return the messages on their way to a stage, after a tick."""
        kind: Kind = "F" if direction == "up" else "B"
        sender = stage - 1 if direction == "up" else stage + 1
        if not 0 <= sender < self.num_stages:
            return 0
        return self.lag(kind, stage) - self.lag(kind, sender)

    @property
    def num_in_flight(self) -> int:
        """Ticks until the first micro-batch has left, and micro-batches in a full pipeline."""
        return self.delay(0)

    def num_ticks(self, num_microbatches: int) -> int:
        """Return the ticks until everything that entered has left again."""
        return num_microbatches + self.num_in_flight if num_microbatches else 0

    def groups(
        self, tick: int, num_microbatches: int | None = None
    ) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of a tick in groups, stage by stage, forward before backward.

        Stages update after a group.

        Args:
            tick: The tick.
            num_microbatches: How many enter, one a tick; None for no end.
        """
        groups: list[list[Action]] = [[] for _ in range(self.num_groups)]
        for stage in range(self.num_stages):
            for kind in KINDS:
                tick_lag, half = divmod(self.slot(kind, stage), 2)
                microbatch = tick - tick_lag
                if microbatch >= 0 and (num_microbatches is None or microbatch < num_microbatches):
                    groups[half % self.num_groups].append(Action(kind, stage, microbatch))
        return tuple(map(tuple, groups))

    def actions(self, tick: int, num_microbatches: int | None = None) -> tuple[Action, ...]:
        """Return the actions of a tick, in their order."""
        return tuple(chain.from_iterable(self.groups(tick, num_microbatches)))

    def sent(self, tick: int, group: int, own: range, num_microbatches: int) -> list[Leg]:
        """Return the messages that a process sends after a group of actions, in their order.

        Args:
            tick: The tick.
            group: Index of the group in the tick.
            own: The stages of the process.
            num_microbatches: How many have entered.
        """
        legs = self._legs(tick, group, num_microbatches)
        return [leg for source, leg in legs if source in own and leg.stage not in own]

    def received(self, tick: int, group: int, own: range, num_microbatches: int) -> list[Leg]:
        """Return the messages that are sent to a process after a group of actions."""
        legs = self._legs(tick, group, num_microbatches)
        return [leg for source, leg in legs if source not in own and leg.stage in own]

    def is_read(self, leg: Leg, tick: int) -> bool:
        """Return whether a message has been read when a tick begins."""
        kind: Kind = "F" if leg.direction == "up" else "B"
        return leg.microbatch + self.lag(kind, leg.stage) < tick

    def _legs(self, tick: int, group: int, num_microbatches: int) -> Iterator[tuple[int, Leg]]:
        """Yield all messages of a group of actions, each with the stage that sends it."""
        for kind, stage, microbatch in self.groups(tick, num_microbatches)[group]:
            if kind == "F" and stage + 1 < self.num_stages:
                yield stage, Leg("up", stage + 1, microbatch)
            elif kind == "B" and stage > 0:
                yield stage, Leg("down", stage - 1, microbatch)


def verify_latency(latency: Any) -> None:
    """Refuse a latency that is no multiple of half a tick, and no sequence of these."""
    latencies = latency if isinstance(latency, list | tuple) else [latency]
    if not all(isinstance(number, Real) and _is_half_ticks(float(number)) for number in latencies):
        raise ValueError(
            "latency must be a multiple of 0.5, at least 0.5, or a list of such numbers, one for "
            f"every pair of neighbouring stages, got {latency!r}"
        )


def _is_half_ticks(latency: float) -> bool:
    return 0 < latency < inf and (2 * latency).is_integer()


def resolve_latency(latency: float | Sequence[float], num_stages: int) -> Latency:
    """Return a latency in its shortest form: whole numbers as int, equal ones as one number."""
    if isinstance(latency, Sequence):
        latencies = tuple(map(_shortest, latency))
        if len(latencies) != num_stages - 1:
            raise ValueError(
                f"latency has {len(latencies)} numbers for {num_stages} stages; it needs one for "
                "every pair of neighbours, or one for all"
            )
        return latencies if len(set(latencies)) > 1 else next(iter(latencies), 1)
    return _shortest(latency)


def _shortest(latency: float) -> int | float:
    return int(latency) if latency == int(latency) else float(latency)
