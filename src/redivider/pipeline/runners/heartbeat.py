"""Heartbeats between processes: find and report the rank that made a pipeline fail.

A thread in each process writes a heartbeat to the shared store every half second: whether the
process works, or which rank it waits for. A process that raises writes its error. On timeout, a
process follows the chain of waits to the rank that is not waiting, or has no heartbeat, and reports
it as the cause. All processes raise the first reason that was reported.

The thread also notices what the main thread cannot: a GPU that waits for a dead peer, or a call
that does not return. After a failure it aborts the communicators, so that the main thread can raise
the reason. If that does not help, it exits the process.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from redivider.errors import PipelineError
from redivider.pipeline.runners.pending import BEAT, TIMED_OUT, Pending, PendingTransfer
from redivider.pipeline.runners.process_group import Communicators

GRACE = 10.0  # seconds from hearing of a failure until the process is killed
SLACK = 5.0  # seconds beyond the timeout for a wait to raise by itself
FAILURE = "failure"
START = "its beginning"  # action of a process before its first tick


class _Heartbeat(NamedTuple):
    """Last heartbeat of a rank."""

    written_at: int
    waits_for: int | None
    """Rank that it waits for; -1 for all, None if it works."""
    action: str


_Others: TypeAlias = tuple[list[int], dict[int, _Heartbeat]]  # silent ranks, last heartbeats


class Watch:
    """Heartbeat of this process, and what it has heard of the others.

    Args:
        store: Store that all processes share.
        rank: Rank of this process.
        ranks: Ranks of all processes.
        timeout: Seconds to wait for another process.
        communicators: Aborted after a failure, by the thread or by the process.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        communicators: Communicators,
    ) -> None:
        self._rank, self._communicators = rank, communicators
        self.stages: dict[int, str] = {}
        """Stages of each rank, in words."""
        self._has_failed = False
        self._state = state = _State(communicators, timeout + SLACK + GRACE)
        self._board = _Board(store, rank, ranks, self.stages, timeout, state)
        own = store.clone()  # its own connection: a blocking call would hold the first one
        board = _Board(own, rank, ranks, self.stages, timeout, state)
        args = (own, board, state, communicators)
        thread = threading.Thread(target=_beat, args=args, daemon=True)
        thread.start()
        weakref.finalize(self, _end, state, thread)  # at the interpreter's exit, too

    def waiting_for(self, rank: int | None) -> "Waiting":
        """Return a context for a call that waits for a rank, or for all.

        If the call fails, it raises the cause: the rank that has failed.
        """
        return Waiting(self, self._state, rank)

    def follow(self, transfer: PendingTransfer) -> None:
        """Watch a transfer that the GPU waits for."""
        self._state.pending.add(transfer)

    @property
    def heard(self) -> PipelineError | None:
        """Reported failure, if any."""
        return None if self._state.heard is None else self._error(self._state.heard)

    def wait_for_reason(self) -> None:
        """Wait until the thread knows why a communicator has failed, if one has."""
        deadline = time.monotonic() + GRACE
        while self._state.heard is None and self._communicators.have_failed():
            if self._state.is_over.wait(0.01) or time.monotonic() > deadline:
                return

    def raise_failure(self) -> None:
        """Raise the reported failure, if any."""
        if self._state.pending.has_broken:
            self.wait_for_reason()
        if self._state.heard is not None:
            self.close()
            raise self._error(self._state.heard)

    def publish(self, reason: str) -> str:
        """Report why this process fails; return the reason that was reported first."""
        return self._board.publish(reason)

    def find_reason(self, rank: int | None, error: str) -> PipelineError:
        """Return the cause of a failed wait: a reported one, or one that the heartbeats show."""
        return self._error(self._board.find_reason(rank, error))

    def close(self) -> None:
        """Stop the thread."""
        self._state.close()

    def fail(self) -> None:
        """Stop the thread, and abort transfers if any are under way."""
        if self._has_failed:
            return
        self._has_failed = True
        is_needed = self._state.has_failed_wait or self._state.pending.is_busy()
        if is_needed and self._state.claim_abort():
            self._communicators.abort(GRACE, self._state.reason)
        self.close()
        has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank == 0 and self._state.published is not None and not has_agent_store:
            time.sleep(3 * BEAT)  # this process may hold the store: let the others read it

    def name(self, rank: int) -> str:
        """Return a rank with its stages, for messages."""
        return self._board.name(rank)

    def note(self, action: str) -> None:
        """Set the current action, which the heartbeat reports."""
        self._state.action = action

    def _error(self, reason: str) -> PipelineError:
        return PipelineError(reason, is_first=reason == self._state.published)


class Waiting:
    """Context of a wait for a rank. A class, because a generator costs more and this is hot."""

    def __init__(self, watch: Watch, state: "_State", rank: int | None) -> None:
        self._watch, self._state, self._rank = watch, state, rank

    def __enter__(self) -> None:
        self._state.waits_since = time.monotonic()
        self._state.waits_for = -1 if self._rank is None else self._rank

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if isinstance(error, RuntimeError | ValueError):
                if not isinstance(error, PipelineError):
                    self._state.has_failed_wait = True
                    raise self._watch.find_reason(self._rank, str(error)) from error
        finally:
            self._state.waits_for = None


class _State:
    """State that the process and its thread share."""

    def __init__(self, communicators: Communicators, limit: float) -> None:
        self.waits_for: int | None = None  # -1 for all
        self.waits_since = 0.0
        self.action = START
        self.published: str | None = None  # reason that this process has reported
        self.heard: str | None = None  # reason that was reported first
        self.is_over = threading.Event()
        self.has_failed_wait = False
        self.pending = Pending(communicators, limit)
        self._abort_lock = threading.Lock()

    @property
    def reason(self) -> str:
        """Why the run fails, as far as this process knows."""
        return self.published or self.heard or "a rank has failed"

    def close(self) -> None:
        """Stop the thread."""
        self.is_over.set()
        self.pending.close()

    def claim_abort(self) -> bool:
        """Return True for the first caller, who is to abort, and False for all others."""
        return self._abort_lock.acquire(blocking=False)

    def find_awaited(self) -> int | None:
        """Return the rank that the process or its GPU waits for; -1 for all."""
        return self.pending.find_awaited() if self.waits_for is None else self.waits_for

    def find_stuck(self, timeout: float) -> tuple[int | None, str] | None:
        """Return the rank that was waited for too long or whose connection broke, and which."""
        waits_for = self.waits_for
        if waits_for is not None and time.monotonic() - self.waits_since > timeout + SLACK:
            return None if waits_for < 0 else waits_for, TIMED_OUT
        return self.pending.find_stuck(timeout)


class _Board:
    """Heartbeats and failures of all processes, in the store."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        stages: dict[int, str],
        timeout: float,
        state: _State,
    ) -> None:
        self._store, self.rank, self._ranks = store, rank, ranks
        self._stages, self._timeout, self._state = stages, timeout, state

    def publish(self, reason: str) -> str:
        """Report why this process fails; return the reason that was reported first."""
        self._state.published = reason
        try:
            first: bytes = self._store.compare_set(FAILURE, "", reason)
        except RuntimeError:  # the store is gone with the process that held it
            return reason
        return first.decode() or reason

    def find_reason(self, rank: int | None, error: str, others: _Others | None = None) -> str:
        """Return the cause of a failed wait: a reported one, or one that the heartbeats show."""
        try:
            return self._find_reason(rank, error, others or self._find_silent_ranks())
        except RuntimeError:
            return self._state.heard or self.say_store_is_gone(rank)

    def beat(self) -> None:
        """Write a heartbeat: the time, the rank that is waited for, and the current action."""
        waits_for = self._state.find_awaited()
        awaited = "-" if waits_for is None else waits_for
        text = f"{time.monotonic_ns()} {awaited} {self._state.action}"
        self._store.set(f"rank {self.rank}", text)

    def read_failure(self) -> str | None:
        """Return the reported failure, if any."""
        return self._store.get(FAILURE).decode() if self._store.check([FAILURE]) else None

    def find_stuck(self) -> str | None:
        """Return the cause if this process waits for a rank that is stuck, else None."""
        stuck = self._state.find_stuck(self._timeout)
        if stuck is None:
            return None
        try:
            others = self._find_silent_ranks()
        except RuntimeError:
            return self.say_store_is_gone(stuck[0])
        if self._state.find_stuck(self._timeout) is None:
            return None  # it was only slow to answer
        return self.find_reason(*stuck, others)

    def name(self, rank: int) -> str:
        """Return a rank with its stages, for messages."""
        stages = self._stages.get(rank)
        return f"rank {rank} ({stages})" if stages else f"rank {rank}"

    def _find_reason(self, rank: int | None, error: str, others: _Others) -> str:
        silent, last = others
        reported = self.read_failure()
        if reported is not None:
            return reported
        if "imed out" in error or "timeout" in error.lower():
            return self.publish(self._blame(rank, silent, last))
        # The neighbour may have aborted because of a third rank: prefer one without a heartbeat.
        return self.publish(f"{self.name(self.rank)}: {self._lost(silent[0] if silent else rank)}")

    def say_store_is_gone(self, rank: int | None) -> str:
        """Return the reason of a failure that nobody can report any more."""
        return (
            f"{self.name(self.rank)}: {self._lost(rank)}; the store, which rank 0 or its "
            "torchrun holds, is gone, too"
        )

    def _lost(self, rank: int | None) -> str:
        who = "another rank" if rank is None else self.name(rank)
        return f"the connection to {who} has broken: it has ended, or its machine has"

    def _find_silent_ranks(self) -> _Others:
        """Return the ranks without a new heartbeat for four beats, and the last ones of all ranks.

        Return early once a failure is reported.
        """
        before = {rank: self._read(rank) for rank in self._ranks}
        deadline = time.monotonic() + 4 * BEAT
        while time.monotonic() < deadline and not self._store.check([FAILURE]):
            time.sleep(BEAT / 10)
            self.beat()
        now = {rank: self._read(rank) for rank in self._ranks}
        others = [rank for rank in self._ranks if rank != self.rank]
        return [rank for rank in others if before[rank].written_at == now[rank].written_at], now

    def _blame(self, rank: int | None, silent: list[int], last: dict[int, _Heartbeat]) -> str:
        """Return the reason of a timeout: silent ranks, or the end of the chain of waits."""
        if silent:
            names = ", ".join(map(self.name, silent))
            return f"{names}: gives no sign of life, and was waited for {self._timeout:g} s"
        culprit, seen = self.rank if rank is None else rank, {self.rank}
        while culprit not in seen and (awaited := last[culprit].waits_for) not in (None, -1):
            seen.add(culprit)
            culprit = awaited
        if culprit == self.rank or last[culprit].waits_for is not None:
            # Blame a rank that does not wait.
            others = (other for other in self._ranks if other != self.rank)
            culprit = next((other for other in others if last[other].waits_for is None), culprit)
        return (
            f"{self.name(culprit)}: in {last[culprit].action}, was waited for {self._timeout:g} s; "
            "it hangs, or its work takes longer than `timeout`"
        )

    def _read(self, rank: int) -> _Heartbeat:
        if not self._store.check([f"rank {rank}"]):
            return _Heartbeat(0, None, START)
        written_at, awaited, action = self._store.get(f"rank {rank}").decode().split(" ", 2)
        return _Heartbeat(int(written_at), None if awaited == "-" else int(awaited), action)


def _end(state: _State, thread: threading.Thread) -> None:
    """Stop and join the thread: if it is in C++ code when Python exits, the process aborts."""
    state.close()
    if thread is not threading.current_thread():
        thread.join(5.0)


def _beat(store: Any, board: _Board, state: _State, communicators: Communicators) -> None:
    """Write heartbeats and watch for failures, until stopped."""
    heard_at, num_failed = 0.0, 0
    communicators.prepare_thread()
    store.set_timeout(timedelta(seconds=5))
    while not state.is_over.wait(BEAT):
        try:
            state.pending.examine()
            board.beat()
            if state.heard is None:
                state.heard = board.read_failure() or board.find_stuck()
            num_failed = 0
        except Exception:
            num_failed += 1
            if num_failed > 3 and state.heard is None:  # the store is gone with its process
                if not state.pending.is_busy():
                    break  # the run has ended, or the main thread notices by itself
                state.heard = board.say_store_is_gone(None)
        if state.heard is None:
            continue
        heard_at = heard_at or time.monotonic()
        seconds = time.monotonic() - heard_at
        # Leave the process time to raise by itself: its communicators may then stay usable.
        if seconds > 2 * BEAT and state.claim_abort():
            communicators.abort(GRACE, state.reason)
        if seconds > GRACE:
            sys.stderr.write(f"rank {board.rank}: ends, since a rank has failed: {state.heard}\n")
            sys.stderr.flush()
            os._exit(1)
    state.close()
