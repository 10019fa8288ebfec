"""Clock of the devices of a pipeline, which advances as their actions run. No torch here.

An action starts when its device is free and its message has arrived. Messages of a link arrive in
the order in which they are read, so that an inbox is a queue of arrival times.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import inf
from typing import Literal, cast

from redivider.pipeline.diagnostics.timeline import Spans
from redivider.pipeline.schedule import Action, Kind
from redivider.pipeline.simulation.waves import Wave


@dataclass(frozen=True)
class Costs:
    """Times of the stages of a pipeline, and where the stages are."""

    forward: list[float]
    backward: list[float]
    """Time of a backward until it sends the gradient of its input."""
    rest: list[float]
    """Time of the rest of a backward: gradients of weights that are computed after sending."""
    hop: list[float]
    """Time of a transfer between neighbouring stages, either direction."""
    device: list[int]
    """Index of the device of every stage."""
    num_late: list[int]
    """Micro-batches that come between a backward and its rest."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return 1 + max(self.device)

    @cached_property
    def whole(self) -> list[float]:
        """Time of all actions of a stage for one micro-batch."""
        times = zip(self.forward, self.backward, self.rest, strict=True)
        return [sum(own) for own in times]


class _Inputs(deque[float]):
    """Inbox of the first stage: an input is always there."""

    def popleft(self) -> float:
        return 0.0


class Clock:
    """Time of every device while waves of actions run.

    Args:
        costs: Times of the stages.
        factors: Factors of the times, one per action.
        spans: Where to record start and end of every action; None to record nothing.
        on_request: Whether a message leaves only after the receiver has requested it, which it does
            once it is ready to run.
        num_recorded: Micro-batches to record, from the first one on.
    """

    def __init__(
        self,
        costs: Costs,
        factors: Iterator[float] | None = None,
        spans: Spans | None = None,
        on_request: bool = False,
        num_recorded: float = inf,
    ) -> None:
        num, hop = len(costs.forward), costs.hop
        self._costs, self._spans, self._num_recorded = costs, spans, num_recorded
        self._factors = repeat(1.0) if factors is None else factors
        self.begin = [-1.0] * costs.num_devices
        """When a device has started its first action."""
        self.free = [0.0] * costs.num_devices
        """When a device has finished its last action."""
        self.busy = [0.0] * costs.num_devices
        """How long a device has computed."""
        up: list[deque[float]] = [_Inputs(), *(deque() for _ in range(num - 1))]
        down: list[deque[float]] = [deque() for _ in range(num)]
        # The last stage hands its forward over to its own backward. Nobody reads below stage 0.
        above, below = [*up[1:], down[-1]], [deque[float](maxlen=0), *down[:-1]]
        # Device, time, inbox, outbox and hop of every stage.
        self._forwards = list(zip(costs.device, costs.forward, up, above, [*hop, 0.0], strict=True))
        self._backwards = list(
            zip(costs.device, costs.backward, down, below, [0.0, *hop], strict=True)
        )
        # From a request to the arrival of its message, at the earliest.
        waits = [2 * on_request * time for time in hop]
        self._waits: dict[Kind, list[float]] = {"F": [0.0, *waits], "B": [*waits, 0.0]}
        self._num_owed = [0] * num  # backward passes whose rest has not run
        self._counts: Counter[tuple[str, int]] = Counter()

    def run(self, waves: Iterable[Wave]) -> None:
        """Run waves of actions."""
        for kind, stages in waves:
            if kind == "F":
                self._run_forwards(stages)
            else:
                self._run_backwards(stages)

    def finish(self) -> None:
        """Run what is left of late backwards."""
        for stage, num in enumerate(self._num_owed):
            for _ in range(num):
                self._run_rest(stage, next(self._factors))

    def _run_forwards(self, stages: Sequence[int]) -> None:
        table, factors, spans = self._forwards, self._factors, self._spans
        waits = self._waits["F"]
        begin, free, busy = self.begin, self.free, self.busy
        for stage in stages:
            device, time, inbox, outbox, hop = table[stage]
            arrival, start = inbox.popleft(), free[device]
            if waits[stage]:
                arrival = max(arrival, start + waits[stage])
            if arrival > start:
                start = arrival
            if begin[device] < 0.0:
                begin[device] = start
            time *= next(factors)
            free[device] = end = start + time
            busy[device] += time
            outbox.append(end + hop)
            if spans is not None:
                self._record("F", stage, start, end)

    def _run_backwards(self, stages: Sequence[int]) -> None:
        table, factors, spans = self._backwards, self._factors, self._spans
        waits = self._waits["B"]
        free, busy, rest = self.free, self.busy, self._costs.rest
        for stage in stages:
            device, time, inbox, outbox, hop = table[stage]
            arrival, start = inbox.popleft(), free[device]
            if waits[stage]:
                arrival = max(arrival, start + waits[stage])
            if arrival > start:
                start = arrival
            factor = next(factors)
            time *= factor
            free[device] = end = start + time
            busy[device] += time
            outbox.append(end + hop)
            if spans is not None:
                self._record("B", stage, start, end)
            if rest[stage]:
                self._num_owed[stage] += 1
                if self._num_owed[stage] > self._costs.num_late[stage]:
                    self._run_rest(stage, factor)

    def _run_rest(self, stage: int, factor: float) -> None:
        device, time = self._costs.device[stage], self._costs.rest[stage] * factor
        start = self.free[device]
        self.free[device] += time
        self.busy[device] += time
        self._num_owed[stage] -= 1
        if self._spans is not None:
            self._record("W", stage, start, self.free[device])

    def _record(self, kind: Kind | Literal["W"], stage: int, start: float, end: float) -> None:
        assert self._spans is not None
        n = self._counts[kind, stage]
        self._counts[kind, stage] += 1
        if n < self._num_recorded:
            self._spans[Action(cast(Kind, kind), stage, n)] = start, end
