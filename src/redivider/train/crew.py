"""The processes of a run: one alone, or those that torchrun has started.

All of them run the same loop; one of them, which sees the losses, writes what a person reads.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan, nan
from typing import Any

import torch

from redivider.pipeline.checkpoint.files import Alone, Writers
from redivider.pipeline.runners.topology import Team
from redivider.train.errors import TrainError

SECONDS = 1.0  # between two questions to all processes whether somebody has asked them to stop


class Crew:
    """One process alone."""

    is_writer = True
    sees_losses = True
    column = 0
    writers: Writers = Alone()

    def decide(self, do: Callable[[], str]) -> str:
        """What the writer finds when it does something, for all."""
        return do()

    def collect(self, value: Any) -> list[Any]:
        """Everybody's plain data."""
        return [value]

    def agrees(self, wish: bool) -> bool:
        """Whether anybody wishes it."""
        return wish

    def stops(self, wish: bool, step: int) -> bool:
        """Whether anybody wishes to stop; asked of all at the same steps, now and then."""
        return wish

    def mean(self, number: float | None) -> float | None:
        """The mean over replicas."""
        return number

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """End all processes if this one cannot go on."""
        yield


class Ranks(Crew):
    """One of several."""

    def __init__(self, team: Team) -> None:
        self._team = self.writers = team
        self.column = team.column
        self.sees_losses = team.is_last
        self.is_writer = team.rank == team.everyone[-1]
        self._asked_at, self._asked_after, self._ask_after = time.monotonic(), 0, 0
        self._interval = 1

    def decide(self, do: Callable[[], str]) -> str:
        texts = self._team.tell_all(json.dumps(do()) if self.is_writer else "")
        said: str = json.loads(next(each for each in texts if each))
        return said

    def collect(self, value: Any) -> list[Any]:
        return [json.loads(each) for each in self._team.tell_all(json.dumps(value))]

    def agrees(self, wish: bool) -> bool:
        return self._team.agree(float(wish)) > 0

    def stops(self, wish: bool, step: int) -> bool:
        if step < self._ask_after:
            return False
        asked = self._team.agree(float(wish)) > 0
        seconds = self._team.agree(time.monotonic() - self._asked_at)
        if self._asked_after:
            rate = (step - self._asked_after) / max(seconds, 1e-6)
            self._interval = max(1, min(10 * self._interval, int(rate * SECONDS)))
        self._asked_at, self._asked_after = time.monotonic(), step
        self._ask_after = step + self._interval
        return asked

    def mean(self, number: float | None) -> float | None:
        found = torch.tensor([nan if number is None else number], dtype=torch.float64)
        self._team.average([found])
        return None if isnan(found) and number is None else float(found)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        with self._team.guarding():
            yield
        self._team.watch.close()


def said_once(error: TrainError) -> TrainError:
    """An error that all processes have, which one of them is to say."""
    error.is_first = os.environ.get("RANK", "0") == "0"
    return error
