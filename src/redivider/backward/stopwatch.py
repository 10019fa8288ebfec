"""Seconds of a function on the CPU or a GPU."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from redivider._torch_private import spin

CLOCK = 2e9  # cycles of a GPU per second, about
AHEAD = 1.5  # seconds that a device waits, for every second of the host in the last call
LONGEST = 0.25  # seconds that a device waits, also after a call that compiled


class Stopwatch:
    """Seconds of calls of a function.

    Args:
        run: The function.
        on_gpu: Whether it runs on a GPU.
        ahead: Whether to let the host run ahead of the device, which then never waits for it.
    """

    def __init__(self, run: Callable[..., Any], *, on_gpu: bool, ahead: bool) -> None:
        self._run, self._on_gpu, self._ahead = run, on_gpu, ahead
        self.readings: list[Callable[[], float]] = []
        """Functions that return the seconds of a call, and wait for the device."""
        self.host = 0.0
        """Seconds that the host is expected to take in the next call: those of the last one."""
        self.was_ahead = False
        """Whether the host had ended the last call before the device began it."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of all calls; waits for the device."""
        return [read() for read in self.readings]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._on_gpu:
            if self._ahead:  # what the device has still to do lets the host run ahead as well
                spin(int(min(AHEAD * self.host, LONGEST) * CLOCK))
            else:
                torch.cuda.synchronize()
            start, end = timer(), timer()
            start.record()
        began = time.perf_counter()
        result = self._run(*args, **keywords)
        took = time.perf_counter() - began
        if self._on_gpu:
            end.record()
            has_begun = start.query()  # type: ignore[no-untyped-call]
            self.was_ahead, self.host = self._ahead and not has_begun, took
            self.readings.append(partial(_elapsed, start, end))
        else:
            self.readings.append(lambda: took)
        return result


def _elapsed(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def timer() -> torch.cuda.Event:
    """Return a CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
