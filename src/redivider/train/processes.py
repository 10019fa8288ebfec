"""Processes of a run: a single one, or those that torchrun has started.

All of them run the same loop. One of them, which has the losses, writes the log.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan, nan
from typing import Any

import torch

from redivider.pipeline.checkpoint.files import Alone, Writers
from redivider.pipeline.runners.topology import Team

SECONDS = 1.0  # between two collectives that ask all processes whether to stop


class Processes:
    """Single process, for which all collectives are trivial."""

    is_writer = True
    sees_losses = True
    column = 0
    writers: Writers = Alone()

    def decide(self, compute: Callable[[], str]) -> str:
        """Call `compute` in the writer, and return its result in all processes."""
        return compute()

    def gather(self, value: Any) -> list[Any]:
        """Return the plain data of all processes."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return flag

    def should_stop(self, flag: bool, step: int) -> bool:
        """Return whether any process wants to stop.

        All processes ask at the same steps, about once a second.
        """
        return flag

    def mean(self, number: float | None) -> float | None:
        """Return the mean over replicas."""
        return number

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """End all processes if this one fails."""
        yield


class Ranks(Processes):
    """One of several processes, which decide together."""

    def __init__(self, team: Team) -> None:
        self._team = self.writers = team
        self.column = team.column
        self.sees_losses = team.is_last
        self.is_writer = team.rank == team.everyone[-1]
        self._asked_at, self._asked_after, self._ask_after = time.monotonic(), 0, 0
        self._interval = 1

    def decide(self, compute: Callable[[], str]) -> str:
        texts = self._team.gather_text(json.dumps(compute()) if self.is_writer else "")
        result: str = json.loads(next(text for text in texts if text))
        return result

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._team.gather_text(json.dumps(value))]

    def any(self, flag: bool) -> bool:
        return self._team.max_over_ranks(float(flag)) > 0

    def should_stop(self, flag: bool, step: int) -> bool:
        # A collective per step would be slow, and a test of the local clock would let ranks
        # disagree about the steps that have one: all derive the interval from the same numbers.
        if step < self._ask_after:
            return False
        stops = self._team.max_over_ranks(float(flag)) > 0
        seconds = self._team.max_over_ranks(time.monotonic() - self._asked_at)
        if self._asked_after:
            rate = (step - self._asked_after) / max(seconds, 1e-6)
            self._interval = max(1, min(10 * self._interval, int(rate * SECONDS)))
        self._asked_at, self._asked_after = time.monotonic(), step
        self._ask_after = step + self._interval
        return stops

    def mean(self, number: float | None) -> float | None:
        value = torch.tensor([nan if number is None else number], dtype=torch.float64)
        self._team.average([value])
        return None if isnan(value) and number is None else float(value)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        with self._team.guarding():
            yield
        self._team.watch.close()
