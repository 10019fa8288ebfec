"""Seconds of a function on the CPU or a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch

from redivider._torch_private import spin

CLOCK = 2e9  # cycles of a GPU per second, about
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
        self._host = 0.0  # seconds of the host in the last call
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._on_gpu:
            torch.cuda.synchronize()
            if self._ahead:
                spin(int(min(1.5 * self._host, LONGEST) * CLOCK))
            start, end = timer(), timer()
            start.record()
        began = time.perf_counter()
        result = self._run(*args, **keywords)
        took = time.perf_counter() - began
        if self._on_gpu:
            end.record()
            end.synchronize()
            self._host = took
            took = start.elapsed_time(end) / 1000
        self.seconds.append(took)
        return result


def timer() -> torch.cuda.Event:
    """Return a CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
