"""The thread that watches a process: what it notices, and what it does then."""

import ctypes
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support import workers
from support.patience import seconds

import redivider as rd
from redivider.pipeline.runners import heartbeat, pending
from redivider.pipeline.runners.heartbeat import SLACK, Watch, _State
from redivider.pipeline.runners.pending import BROKEN, TIMED_OUT, Pending, PendingTransfer
from redivider.pipeline.runners.process_group import Communicators


class Mark:
    """A point in the work of a device."""

    def __init__(self, is_passed: bool = False) -> None:
        self.is_passed = is_passed

    def has_passed(self) -> bool:
        return self.is_passed


def transfer(rank: int | None = None, end: Mark | None = None, start: Mark | None = None):
    """Return a transfer; by default it does not end."""
    return PendingTransfer(rank, start or Mark(True), end or Mark())


class FakeCommunicators:
    """Stand-in for the communicators that a watch examines and aborts."""

    exits_in: float | None

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


def make_communicators(has_failed: bool = False) -> Any:
    return FakeCommunicators(has_failed)


def pend(*transfers) -> Pending:
    pending = Pending(make_communicators(), 600)
    for pending_transfer in transfers:
        pending.add(pending_transfer)
    return pending


def test_transfers_that_come_to_their_end_are_forgotten():
    last = Mark()
    transfers = pend(transfer(1, Mark(True)), transfer(None, Mark(True)), transfer(2, last))
    transfers.examine()
    assert transfers.find_stuck(60) is None
    assert [left.rank for left in transfers._transfers] == [2] and transfers.is_busy()
    last.is_passed = True
    transfers.examine()
    assert transfers.find_stuck(0) is None and not transfers._transfers
    assert not transfers.is_busy()


def test_a_device_that_waits_for_too_long_waits_for_the_first_transfer():
    transfers = pend(transfer(3), transfer(1, Mark(True)))
    transfers._moved_at -= 10
    transfers.examine()
    assert transfers.find_stuck(9) == (3, TIMED_OUT)
    assert transfers.find_stuck(60) is None
    assert transfers.find_awaited() == 3  # which it reports to the others
    transfers._transfers.clear()
    assert transfers.find_awaited() is None


@pytest.mark.parametrize("transfers, rank", [([transfer(2)], 2), ([], None)])
def test_a_communicator_that_fails_is_noticed(transfers, rank):
    transfers = pend(*transfers)
    transfers._communicators = make_communicators(has_failed=True)
    transfers.examine()
    assert transfers.find_stuck(60) == (rank, BROKEN) and transfers.is_busy()


def test_a_device_that_computes_does_not_wait():
    transfers = pend(transfer(3, start=Mark(False)))
    transfers._moved_at -= 10
    transfers.examine()
    assert transfers.find_stuck(9) is None and transfers.find_awaited() is None


def test_a_call_that_does_not_return_is_noticed():
    state = _State(make_communicators(), 600)
    state.waits_for, state.waits_since = -1, time.monotonic() - 10 - SLACK
    assert state.find_stuck(9) == (None, TIMED_OUT)
    assert state.find_stuck(60) is None


@pytest.mark.parametrize("how", ["hangs", "breaks"])
def test_a_failure_aborts_and_is_everybodys_reason(how, monkeypatch):
    for module in (heartbeat, pending):
        monkeypatch.setattr(module, "BEAT", 0.02)
    store = dist.PrefixStore("run", dist.HashStore())
    communicators = make_communicators(has_failed=how == "breaks")
    ours = Watch(store, 1, [0, 1, 2], 0.1 if how == "hangs" else 600, communicators)
    theirs = Watch(store, 2, [0, 1, 2], 60, make_communicators())  # rank 0 gives no sign of life
    ours.stages[0] = "stage 0"
    ours.follow(transfer())
    assert communicators.aborted.wait(seconds(30))
    with pytest.raises(rd.PipelineError, match=r"rank 0 \(stage 0\)") as caught:
        ours.raise_failure()
    said = "gives no sign of life, and was waited for 0.1 s"
    assert (said if how == "hangs" else "the connection to") in str(caught.value)
    assert caught.value.is_first
    deadline = time.monotonic() + seconds(30)
    while theirs.heard is None and time.monotonic() < deadline:
        time.sleep(0.01)
    heard = theirs.heard
    assert heard is not None and str(heard) == str(caught.value) and not heard.is_first
    for watch in (ours, theirs):
        watch.close()


def test_a_transfer_that_ends_while_others_are_asked_is_no_failure(monkeypatch):
    for module in (heartbeat, pending):
        monkeypatch.setattr(module, "BEAT", 0.02)
    looked, end = [], Mark()
    find_silent_ranks = heartbeat._Board._find_silent_ranks

    def look(board):
        others = find_silent_ranks(board)
        looked.append(True)
        end.is_passed = True
        ours._state.pending.examine()
        return others

    monkeypatch.setattr(heartbeat._Board, "_find_silent_ranks", look)
    store = dist.PrefixStore("run", dist.HashStore())
    ours = Watch(store, 0, [0], 0.1, make_communicators())
    ours.follow(transfer(end=end))
    deadline = time.monotonic() + seconds(30)
    while not looked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert looked and ours.heard is None and not store.check([heartbeat.FAILURE])
    ours.close()


def block():
    heartbeat.GRACE = heartbeat.SLACK = 0.5
    watch = Watch(dist.HashStore(), 0, [0], 1.0, Communicators())
    watch.follow(transfer(start=Mark()))
    ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock, as some of torch's calls to CUDA


def test_the_timer_runs_while_transfers_are_pending():
    communicators, last = make_communicators(), Mark()
    transfers = Pending(communicators, 7)
    transfers.add(transfer(1, last))
    assert communicators.exits_in == 7
    communicators.exits_in = None
    transfers.examine()
    assert communicators.exits_in == 7
    last.is_passed = True
    transfers.examine()
    assert communicators.exits_in is None
    transfers.add(transfer())
    transfers.close()
    transfers.examine()
    assert communicators.exits_in is None  # a pipeline that is closed ends no process


def test_the_timer_of_another_pipeline_is_left_alone():
    communicators = make_communicators()
    communicators.exits_in = 7
    Pending(communicators, 600).close()
    assert communicators.exits_in == 7


@pytest.mark.slow
def test_a_process_whose_interpreter_is_blocked_ends(tmp_path):
    process = workers.start(block, output=tmp_path / "said.txt")
    assert not workers.end([process], seconds(60))
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 1 and "Timeout" in said, said


class Store(dict):
    """A store in the memory of a process, which may be gone."""

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
    store, communicators = Store(), make_communicators()
    ours = Watch(store, 1, [0, 1], 600, communicators)
    ours.follow(transfer())
    store.is_gone = True
    assert communicators.aborted.wait(seconds(30))
    with pytest.raises(rd.PipelineError, match="rank 0 or its torchrun holds, is gone"):
        ours.raise_failure()


def test_a_store_that_is_gone_at_the_end_is_none(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    store, communicators = Store(), make_communicators()
    ours = Watch(store, 1, [0, 1], 600, communicators)
    store.is_gone = True
    assert ours._state.is_over.wait(seconds(30))
    assert ours.heard is None and not communicators.aborted.is_set()
