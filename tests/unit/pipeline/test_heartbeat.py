"""The thread that looks after a process: what it notices, and what it does then."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.patience import seconds

import redivider as rd
from redivider.pipeline.runners import heartbeat, pending
from redivider.pipeline.runners.heartbeat import SLACK, Watch, _State
from redivider.pipeline.runners.pending import BROKEN, TIMED_OUT, Pending


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


class Communicators:
    """What the watch asks of a process group."""

    def __init__(self, has_failed: bool = False) -> None:
        self.aborted, self._has_failed = threading.Event(), has_failed

    def prepare_thread(self) -> None:
        pass

    def have_failed(self) -> bool:
        return self._has_failed

    def abort(self, grace: float, reason: str) -> None:
        self.aborted.set()

    def exit_later(self, seconds: float) -> None:
        self.exits_in = seconds

    def cancel_exit(self) -> None:
        self.exits_in = None


def pend(*transfers) -> Pending:
    """Transfers whose thread does not run: a test examines them."""
    found = Pending(Communicators(), 600)
    found._thread = threading.current_thread()
    for transfer in transfers:
        found.add(*transfer)
    return found


def test_transfers_that_come_to_their_end_are_forgotten():
    last = Work()
    transfers = pend((Work(True), 1, None), (Work(True), None, None), (last, 2, None))
    transfers.examine()
    assert transfers.find_stuck(60) is None
    assert list(transfers._transfers) == [(last, 2, None)] and transfers.is_busy()
    last.is_over = True
    transfers.examine()
    assert transfers.find_stuck(0) is None and not transfers._transfers
    assert not transfers.is_busy()


def test_a_device_that_waits_for_too_long_waits_for_the_first_transfer():
    transfers = pend((Work(), 3, Event(True)), (Work(True), 1, Event(True)))
    transfers._moved_at -= 10
    transfers.examine()
    assert transfers.find_stuck(9) == (3, TIMED_OUT)
    assert transfers.find_stuck(60) is None
    assert transfers.find_awaited() == 3  # which others are told
    transfers._transfers.clear()
    assert transfers.find_awaited() is None


def test_a_transfer_that_is_over_may_have_failed():
    transfers = pend((Work(True, "the remote process has exited"), 2, None))
    transfers.examine()
    assert transfers.find_stuck(60) == (2, BROKEN) and transfers.is_busy()
    assert transfers.is_doubtful  # until the reason is found: the device has gone on with anything


def test_a_device_that_computes_does_not_wait():
    transfers = pend((Work(), 3, Event(False)))
    transfers._moved_at -= 10
    transfers.examine()
    assert transfers.find_stuck(9) is None and transfers.find_awaited() is None


def test_a_device_that_does_not_answer_is_noticed():
    """A question to it blocks: it is asked in a thread that nobody waits for."""
    answered = threading.Event()

    class Blocked(Work):
        def is_completed(self) -> bool:
            answered.wait()
            return True

    transfers = Pending(Communicators(), 600)
    transfers.add(Blocked(is_over=True), 3, None)
    transfers._moved_at -= 10
    time.sleep(2 * pending.BEAT)
    assert transfers.find_stuck(9) == (3, TIMED_OUT)
    answered.set()
    transfers.close()
    transfers.join(seconds(30))


def test_a_call_that_does_not_return_is_noticed():
    state = _State(Communicators(), 600)
    state.waits_for, state.waits_since = -1, time.monotonic() - 10 - SLACK
    assert state.find_stuck(9) == (None, TIMED_OUT)
    assert state.find_stuck(60) is None


@pytest.mark.parametrize("how", ["hangs", "breaks", "breaks unseen"])
def test_a_failure_aborts_and_is_everybodys_reason(how, monkeypatch):
    for module in (heartbeat, pending):
        monkeypatch.setattr(module, "BEAT", 0.02)
    store = dist.PrefixStore("run", dist.HashStore())
    communicators = Communicators(has_failed=how == "breaks unseen")
    ours = Watch(store, 1, [0, 1, 2], 0.1 if how == "hangs" else 600, communicators)
    theirs = Watch(store, 2, [0, 1, 2], 60, Communicators())  # rank 0 gives no sign of life
    ours.stages[0] = "stage 0"
    ours.follow(Work(how == "breaks", "broken"), None, None)
    assert communicators.aborted.wait(seconds(30))
    with pytest.raises(rd.PipelineError, match=r"rank 0 \(stage 0\)") as caught:
        ours.verify_well()
    said = "gives no sign of life, and was waited for 0.1 s"
    assert (said if how == "hangs" else "the connection to") in str(caught.value)
    assert caught.value.is_first
    deadline = time.monotonic() + seconds(30)
    while theirs.heard is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert str(theirs.heard) == str(caught.value) and not theirs.heard.is_first
    for watch in (ours, theirs):
        watch.close()


def test_a_device_that_is_only_slow_to_answer_is_no_failure(monkeypatch):
    for module in (heartbeat, pending):
        monkeypatch.setattr(module, "BEAT", 0.02)
    looked = []

    class Slow(Work):
        def is_completed(self) -> bool:
            while not looked:
                time.sleep(0.01)
            return True

    look_around = heartbeat._Board._look_around

    def look(board):
        looked.append(True)
        while ours._state.pending.is_busy():
            time.sleep(0.01)
        return look_around(board)

    monkeypatch.setattr(heartbeat._Board, "_look_around", look)
    store = dist.PrefixStore("run", dist.HashStore())
    ours = Watch(store, 0, [0], 0.1, Communicators())
    ours.follow(Slow(is_over=True), None, None)
    deadline = time.monotonic() + seconds(30)
    while not looked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert looked and ours.heard is None and not store.check([heartbeat.FAILURE])
    ours.close()


BLOCKED = """
import ctypes, sys, threading
import torch.distributed as dist
from redivider.pipeline.runners import heartbeat
from redivider.pipeline.runners.process_group import Communicators

class Work:
    def is_completed(self):
        ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock, as torch's queries of CUDA

heartbeat.GRACE = heartbeat.SLACK = 0.5
watch = heartbeat.Watch(dist.HashStore(), 0, [0], 1.0, Communicators())
watch.follow(Work(), None, None)
threading.Event().wait()
"""


def test_the_timer_runs_while_transfers_are_pending():
    communicators, last = Communicators(), Work()
    transfers = Pending(communicators, 7)
    transfers.add(last, 1, None)
    assert communicators.exits_in == 7  # before anybody asks the device
    communicators.exits_in, last.is_over = None, True
    deadline = time.monotonic() + seconds(30)
    while transfers.is_busy() and time.monotonic() < deadline:
        time.sleep(0.01)
    transfers.close()
    transfers.join(seconds(30))
    assert not transfers.is_busy() and communicators.exits_in is None


@pytest.mark.slow
def test_a_process_whose_device_blocks_the_interpreter_ends():
    command = [sys.executable, "-c", BLOCKED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
    assert ended.returncode == 1 and "is_completed" in ended.stderr, ended.stderr


def test_a_thread_does_not_wait_for_itself():
    transfers, errors = Pending(Communicators(), 600), []

    class Collected(Work):
        def is_completed(self) -> bool:  # as a finalizer that runs in this thread
            try:
                transfers.join(1.0)
            except RuntimeError as error:
                errors.append(error)
            transfers.close()
            return True

    transfers.add(Collected(is_over=True), 1, None)
    transfers._thread.join(seconds(30))
    assert not errors and not transfers._thread.is_alive()


class Store(dict):
    """A store in the memory of a process, which may end."""

    is_gone = False

    def clone(self):
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        if self.is_gone:
            raise RuntimeError("connection reset")
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.set("checked", "")
        return all(key in self for key in keys)


def test_a_store_that_is_gone_while_the_device_waits_is_a_failure(monkeypatch):
    """Nobody could report one, nor would the main thread notice."""
    for module in (heartbeat, pending):
        monkeypatch.setattr(module, "BEAT", 0.02)
    store, communicators = Store(), Communicators()
    ours = Watch(store, 1, [0, 1], 600, communicators)
    ours.follow(Work(), None, None)
    store.is_gone = True
    assert communicators.aborted.wait(seconds(30))
    with pytest.raises(rd.PipelineError, match="rank 0 or its torchrun holds, is gone"):
        ours.verify_well()


def test_a_store_that_is_gone_at_the_end_is_none(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    store, communicators = Store(), Communicators()
    ours = Watch(store, 1, [0, 1], 600, communicators)
    store.is_gone = True
    assert ours._state.is_over.wait(seconds(30))
    assert ours.heard is None and not communicators.aborted.is_set()
