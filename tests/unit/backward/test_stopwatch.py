"""Seconds of a function: how long a device waits, so that the host runs ahead of it."""

import time

import pytest
import torch

from redivider.backward import stopwatch
from redivider.backward.stopwatch import CLOCK, LONGEST, Stopwatch


class Event:
    """Stand-in for an event of CUDA."""

    has_come = True

    def record(self):
        pass

    def query(self):
        return self.has_come

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


@pytest.mark.parametrize("ahead, has_come, was_ahead", [(1, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_it_tells_whether_the_device_waited_for_all_of_the_call(
    monkeypatch, ahead, has_come, was_ahead
):
    monkeypatch.setattr(stopwatch, "spin", lambda cycles: None)
    monkeypatch.setattr(stopwatch, "timer", Event)
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(Event, "has_come", bool(has_come))
    watch = Stopwatch(time.sleep, on_gpu=True, ahead=bool(ahead))
    assert not watch.was_ahead
    watch(0)
    assert watch.was_ahead == bool(was_ahead)
    assert len(waits) == (not ahead), "a host that is ahead need not wait"
