"""Clock of training time, which can be paused."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Stopwatch of training time; a resumed run continues from its last value."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elapsed = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._elapsed + running

    def start(self, seconds: float) -> None:
        """Start to count from `seconds`."""
        self._elapsed, self._started = seconds, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock, after the device has finished its queued work."""
        # CUDA runs behind the host: without this, queued training work would not be counted.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._elapsed, self._started = self.seconds, None
        yield
        self._started = time.perf_counter()
