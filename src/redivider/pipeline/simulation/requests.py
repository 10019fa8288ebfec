"""Requests of receivers, without which a message does not leave. No torch here.

Over gloo a sender waits for the receiver's request, so that a message arrives two hops after the
request at the earliest. `DistributedPipeline` requests a message when it begins the tick in which
the message is sent, or `latency` - 1 ticks before. torch.distributed.pipelining requests it when it
is needed.
"""

from collections.abc import Sequence

from redivider.pipeline.schedule import KINDS, Kind, Schedule


class Requests:
    """Times at which stages request messages.

    Args:
        hop: Time of a transfer between neighbouring stages.
        schedule: Schedule of a `DistributedPipeline`; None for requests that are made when needed.
    """

    def __init__(self, hop: Sequence[float], schedule: Schedule | None) -> None:
        self._hops: dict[Kind, list[float]] = {"F": [0.0, *hop], "B": [*hop, 0.0]}
        self._schedule = schedule
        self._counts = {kind: [0] * (len(hop) + 1) for kind in KINDS}
        self._ends: list[dict[int, float]] = [{} for _ in range(len(hop) + 1)]  # of ticks
        if schedule is not None:
            self._lags = {kind: _lags(schedule, kind) for kind in KINDS}
            self._max_ticks = schedule.max_ticks

    def earliest(self, kind: Kind, stage: int, free: float) -> float:
        """Return when the message of a stage's next action arrives at the earliest.

        Args:
            kind: Kind of the action.
            stage: The stage.
            free: When its device has finished its last action.
        """
        hop = self._hops[kind][stage]
        if not hop:
            return 0.0
        if self._schedule is None:
            return free + 2 * hop
        sent, _ = self._lags[kind][stage]
        begin = self._counts[kind][stage] + sent - self._max_ticks
        return self._ends[stage].get(begin, 0.0) + 2 * hop

    def note(self, kind: Kind, stage: int, end: float) -> None:
        """Note the end of a stage's action."""
        if self._schedule is None:
            return
        _, lag = self._lags[kind][stage]
        counts, ends = self._counts[kind], self._ends[stage]
        tick = counts[stage] + lag
        counts[stage] += 1
        ends[tick] = end  # the last action of a tick overwrites the first
        ends.pop(tick - 2 * self._max_ticks - 2, None)


def _lags(schedule: Schedule, kind: Kind) -> list[tuple[int, int]]:
    """Return the ticks from a micro-batch's entry until its message is sent, and read."""
    lags = [schedule.lag(kind, stage) for stage in range(schedule.num_stages)]
    sent = [0, *lags[:-1]] if kind == "F" else [*lags[1:], 0]
    return list(zip(sent, lags, strict=True))
