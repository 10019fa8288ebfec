"""The thread that looks after a process: what it notices, and what it does then."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from patience import seconds

import redivider as rd
from redivider.pipeline.runners import heartbeat as watch
from redivider.pipeline.runners.heartbeat import BROKEN, SLACK, TIMED_OUT, Watch, _State


class Work:
    """A transfer on a device."""

    def __init__(self, is_over: bool = False, error: str | None = None) -> None:
        self.is_over, self._error = is_over, error

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta) -> None:
        assert self.is_over
        if self._error is not None:
            raise RuntimeError(self._error)


class Event:
    """A place in the work of a device."""

    def __init__(self, is_over: bool) -> None:
        self._is_over = is_over

    def query(self) -> bool:
        return self._is_over


def test_transfers_that_come_to_their_end_are_forgotten():
    state, last = _State(), Work()
    state.under_way.extend([(Work(True), 1, None), (Work(True), None, None), (last, 2, None)])
    assert state.find_stuck(60) is None
    assert list(state.under_way) == [(last, 2, None)] and state.is_busy()
    last.is_over = True
    assert not state.is_busy()
    assert state.find_stuck(0) is None and not state.under_way


def test_a_device_that_waits_for_too_long_waits_for_the_first_transfer():
    state = _State()
    state.under_way.extend([(Work(), 3, Event(True)), (Work(True), 1, Event(True))])
    state._moved_at -= 10
    assert state.find_stuck(9) == (3, TIMED_OUT)
    assert state.find_stuck(60) is None
    assert state.find_awaited() == 3  # which others are told
    state.under_way.clear()
    assert state.find_awaited() is None


def test_a_transfer_that_is_over_may_have_failed():
    state = _State()
    state.under_way.append((Work(True, "the remote process has exited"), 2, None))
    assert state.find_stuck(60) == (2, BROKEN)
    assert state.is_doubtful  # until the reason is found: the device has gone on with anything


def test_a_device_that_computes_does_not_wait():
    state = _State()
    state.under_way.append((Work(), 3, Event(False)))
    state._moved_at -= 10
    assert state.find_stuck(9) is None and state.find_awaited() is None


def test_a_call_that_does_not_return_is_noticed():
    state = _State()
    state.waits_for, state.waits_since = -1, time.monotonic() - 10 - SLACK
    assert state.find_stuck(9) == (None, TIMED_OUT)
    assert state.find_stuck(60) is None


@pytest.mark.parametrize("is_over", [False, True], ids=["hangs", "breaks"])
def test_a_failure_aborts_and_is_everybodys_reason(is_over, monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.02)
    aborted = threading.Event()
    store = dist.PrefixStore("run", dist.HashStore())
    ours = Watch(store, 1, [0, 1, 2], 0.1, aborted.set)
    theirs = Watch(store, 2, [0, 1, 2], 60, lambda: None)  # rank 0 gives no sign of life
    ours.stages[0] = "stage 0"
    ours.verify_well()
    ours.follow(Work(is_over, "broken"), None, None)
    assert aborted.wait(seconds(30))
    with pytest.raises(rd.PipelineError, match=r"rank 0 \(stage 0\)") as caught:
        ours.verify_well()
    said = "the connection to" if is_over else "gives no sign of life, and was waited for 0.1 s"
    assert said in str(caught.value) and caught.value.is_first
    deadline = time.monotonic() + seconds(30)
    while theirs.heard is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert str(theirs.heard) == str(caught.value) and not theirs.heard.is_first
    for each in (ours, theirs):
        each.close()
