"""Seconds of training: a clock that stands still while something else is done."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Counts from where a run was left."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """So far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._done + running

    def start(self, seconds: float) -> None:
        """Go on from so many."""
        self._done, self._since = seconds, time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Surround what does not count, once the device has done what does."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._done, self._since = self.seconds, None
        yield
        self._since = time.perf_counter()
