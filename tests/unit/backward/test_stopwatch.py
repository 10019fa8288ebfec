"""Seconds of a function: how long a device waits, so that the host runs ahead of it."""

import time

import torch

from redivider.backward import stopwatch
from redivider.backward.stopwatch import CLOCK, LONGEST, Stopwatch


class Event:
    """Stand-in for an event of CUDA."""

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 7.0


def test_a_device_waits_for_the_host_but_not_for_a_compiler(monkeypatch):
    spun: list[int] = []
    monkeypatch.setattr(stopwatch, "spin", spun.append)
    monkeypatch.setattr(stopwatch, "timer", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watch = Stopwatch(time.sleep, on_gpu=True, ahead=True)
    for seconds in (LONGEST, 0.01, 0.0):  # the first call compiles
        watch(seconds)
    assert watch.seconds == [0.007] * 3
    first, longest, short = (cycles / CLOCK for cycles in spun)
    assert first == 0.0 and longest == LONGEST and short >= 0.015
