"""Find out who is to blame when a pipeline over processes stops.

Every half second a thread of each process writes into the store that all share whether the process
works or for whom it waits. Whoever raises writes why. Whoever waits for too long follows who waits
for whom to a process that does not wait for anyone, or whose thread has stopped to write, and
blames that one. The first reason is everybody's.

The thread also looks after what the process itself cannot: transfers that its GPU waits for, and
calls of the backend that do not return. When it hears of a failure it aborts the communicators, so
that the process gets to raise the reason; a process that still does not come to an end is ended.
"""

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from redivider.errors import PipelineError

BEAT = 0.5  # seconds
GRACE = 10.0  # seconds for a process that has heard of a failure to end by itself
SLACK = 5.0  # seconds for a wait to notice by itself that its time is over
FAILURE = "failure"
TIMED_OUT = "timed out"
BROKEN = "broken"


class Watch:
    """What this process knows of the others, and they of it.

    Args:
        store: Which all processes share.
        rank: Of this process.
        ranks: Of all.
        timeout: Seconds to wait for another process.
        abort: Called by another thread when the run has failed: releases whoever is in the middle
            of a transfer.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        abort: Callable[[], None],
    ) -> None:
        self._rank, self._timeout, self._abort = rank, timeout, abort
        self.stages: dict[int, str] = {}
        """Which stages each rank has, in words."""
        self._state = state = _State()
        self._board = _Board(store, rank, ranks, self.stages, timeout, state)
        own = store.clone()  # a connection of its own: others may block the first
        board = _Board(own, rank, ranks, self.stages, timeout, state)
        thread = threading.Thread(target=_beat, args=(own, board, state, abort), daemon=True)
        thread.start()
        weakref.finalize(self, _end, state, thread)  # at the interpreter's exit, too

    def waiting(self, rank: int | None) -> "Waiting":
        """Surround a wait for a rank, or for all; errors of the backend become their reason."""
        return Waiting(self, self._state, rank)

    def follow(self, work: Any, rank: int | None, ready: Any) -> None:
        """Look after a transfer with a rank, or with all, that a device waits for.

        `ready` is an event: until it is over, the device is busy with something else.
        """
        if not self._state.is_over.is_set():
            self._state.under_way.append((work, rank, ready))

    @property
    def heard(self) -> PipelineError | None:
        """Why another process has failed, or what this one waits for in vain."""
        return None if self._state.heard is None else self._error(self._state.heard)

    def settle(self) -> None:
        """Wait until the reason of a transfer that has failed is known: numbers may be of it."""
        deadline = time.monotonic() + GRACE
        while self._state.is_doubtful and self._state.heard is None:
            if self._state.is_over.wait(0.01) or time.monotonic() > deadline:
                return

    def verify_well(self) -> None:
        """Raise if another process has failed."""
        self.settle()
        if self._state.heard is not None:
            self.close()
            raise self._error(self._state.heard)

    def publish(self, reason: str) -> str:
        """Tell all why this process cannot go on; the first reason is everybody's."""
        return self._board.publish(reason)

    def find_reason(self, rank: int | None, error: str) -> PipelineError:
        """Why a wait for a rank has failed: what somebody has said, or what can be seen."""
        return self._error(self._board.find_reason(rank, error))

    def close(self) -> None:
        """Stop watching: this process is about to end."""
        self._state.is_over.set()

    def fail(self) -> None:
        """Stop watching; abort what is under way, if there is anything: the run has failed."""
        self.close()
        if self._state.is_busy() and self._state.claim_abort():
            self._abort()

    def name(self, rank: int) -> str:
        """A rank, with its stages."""
        return self._board.name(rank)

    def note(self, doing: str) -> None:
        """Say what this process does."""
        self._state.doing = doing

    def _error(self, reason: str) -> PipelineError:
        found = PipelineError(reason)
        found.is_first = reason == self._state.said
        return found


class Waiting:
    """A wait for a rank; entered several times in a tick: as a generator it would take longer."""

    def __init__(self, watch: Watch, state: "_State", rank: int | None) -> None:
        self._watch, self._state, self._rank = watch, state, rank

    def __enter__(self) -> None:
        self._state.waits_since = time.monotonic()
        self._state.waits_for = -1 if self._rank is None else self._rank

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if isinstance(error, RuntimeError | ValueError):
                if not isinstance(error, PipelineError):
                    raise self._watch.find_reason(self._rank, str(error)) from error
        finally:
            self._state.waits_for = None


class _State:
    """What the process and its thread tell each other."""

    def __init__(self) -> None:
        self.waits_for: int | None = None  # -1 for all
        self.waits_since = 0.0
        self.doing = "its beginning"
        self.said: str | None = None
        self.heard: str | None = None
        self.is_over = threading.Event()
        self.under_way: deque[tuple[Any, int | None, Any]] = deque()
        self.is_doubtful = False  # the end of a transfer is being looked at, or it has failed
        self._moved_at = time.monotonic()
        self._abort_lock = threading.Lock()

    def claim_abort(self) -> bool:
        """Whether the caller is the one to abort: once."""
        return self._abort_lock.acquire(blocking=False)

    def is_busy(self) -> bool:
        """Whether a device waits for a transfer."""
        try:
            return any(not work.is_completed() for work, _, _ in tuple(self.under_way))
        except RuntimeError:
            return True

    def find_awaited(self) -> int | None:
        """The rank that this process waits for, or its device since some beats; -1 for all."""
        if self.waits_for is None and self.under_way:
            if time.monotonic() - self._moved_at > 3 * BEAT:
                rank = self.under_way[0][1]
                return -1 if rank is None else rank
        return self.waits_for

    def find_stuck(self, timeout: float) -> tuple[int | None, str] | None:
        """For whom this process or its device waits in vain, and whether the connection broke."""
        now = time.monotonic()
        waits_for = self.waits_for
        if waits_for is not None and now - self.waits_since > timeout + SLACK:
            return None if waits_for < 0 else waits_for, TIMED_OUT
        while self.under_way:
            work, rank, ready = self.under_way[0]
            try:
                if not work.is_completed():
                    if ready is not None and not ready.query():
                        self._moved_at = now  # it does not wait: it computes
                    break
                # It is over, or has failed. If it has, NCCL aborts its communicator here, and the
                # device goes on with whatever is in its memory.
                self.is_doubtful = True
                work.wait(timedelta(seconds=1))
            except RuntimeError:
                return rank, BROKEN  # and stays in doubt, until the reason is found
            self.is_doubtful = False
            self.under_way.popleft()
            self._moved_at = now
        if not self.under_way:
            self._moved_at = now
        if now - self._moved_at > timeout:
            return self.under_way[0][1], TIMED_OUT
        return None


class _Board:
    """The store, on which every process writes what it does and why it failed."""

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
        """Tell all why this process cannot go on; the first reason is everybody's."""
        self._state.said = reason
        try:
            said: bytes = self._store.compare_set(FAILURE, "", reason)
        except RuntimeError:  # the store is gone with the process that held it
            return reason
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(3 * BEAT)  # it may be this one: others must hear of it first
        return said.decode() or reason

    def find_reason(self, rank: int | None, error: str) -> str:
        """Why a wait for a rank has failed: what somebody has said, or what can be seen."""
        try:
            return self._find_reason(rank, error)
        except RuntimeError:
            if self._state.heard is not None:
                return self._state.heard
            return (
                f"{self.name(self.rank)}: {self._lost(rank)}; the store, which rank 0 or its "
                "torchrun holds, is gone, too"
            )

    def beat(self) -> None:
        """Say that this process lives, for whom it waits and what it does."""
        waits_for = self._state.find_awaited()
        awaited = "-" if waits_for is None else waits_for
        text = f"{time.monotonic_ns()} {awaited} {self._state.doing}"
        self._store.set(f"rank {self.rank}", text)

    def read_failure(self) -> str | None:
        """Why some process has failed, if one has."""
        return self._store.get(FAILURE).decode() if self._store.check([FAILURE]) else None

    def find_stuck(self) -> str | None:
        """Why this process waits in vain, if it does."""
        found = self._state.find_stuck(self._timeout)
        return None if found is None else self.find_reason(*found)

    def name(self, rank: int) -> str:
        """A rank, with its stages."""
        stages = self._stages.get(rank)
        return f"rank {rank} ({stages})" if stages else f"rank {rank}"

    def _find_reason(self, rank: int | None, error: str) -> str:
        silent, last = self._look_around()
        found = self.read_failure()
        if found is not None:
            return found
        if "imed out" in error or "timeout" in error.lower():
            return self.publish(self._blame(rank, silent, last))
        # A connection may also break since its other end has been aborted by now.
        return self.publish(f"{self.name(self.rank)}: {self._lost(silent[0] if silent else rank)}")

    def _lost(self, rank: int | None) -> str:
        who = "another rank" if rank is None else self.name(rank)
        return f"the connection to {who} has broken: it has ended, or its machine has"

    def _look_around(self) -> tuple[list[int], dict[int, tuple[int, Any, str]]]:
        """The ranks that give no sign of life, and what all of them said last.

        Ends as soon as one has said why it failed.
        """
        before = {each: self._read(each) for each in self._ranks}
        deadline = time.monotonic() + 4 * BEAT
        while time.monotonic() < deadline and not self._store.check([FAILURE]):
            time.sleep(BEAT / 10)
            self.beat()
        now = {each: self._read(each) for each in self._ranks}
        others = [each for each in self._ranks if each != self.rank]
        return [each for each in others if before[each][0] == now[each][0]], now

    def _blame(
        self, rank: int | None, silent: list[int], now: dict[int, tuple[int, Any, str]]
    ) -> str:
        if silent:
            names = ", ".join(map(self.name, silent))
            return f"{names}: gives no sign of life, and was waited for {self._timeout:g} s"
        culprit, seen = self.rank if rank is None else rank, {self.rank}
        while culprit not in seen and now[culprit][1] is not None and now[culprit][1] >= 0:
            seen.add(culprit)
            culprit = now[culprit][1]
        if culprit == self.rank or now[culprit][1] is not None:  # blame one that does not wait
            others = (each for each in self._ranks if each != self.rank)
            culprit = next((each for each in others if now[each][1] is None), culprit)
        return (
            f"{self.name(culprit)}: in {now[culprit][2]}, was waited for {self._timeout:g} s; it "
            "hangs, or its work takes longer than `timeout`"
        )

    def _read(self, rank: int) -> tuple[int, Any, str]:
        """When a rank last gave a sign, for whom it waits, and what it says that it does."""
        if not self._store.check([f"rank {rank}"]):
            return 0, None, "its beginning"
        sign, waits_for, doing = self._store.get(f"rank {rank}").decode().split(" ", 2)
        return int(sign), None if waits_for == "-" else int(waits_for), doing


def _end(state: _State, thread: threading.Thread) -> None:
    """Have a thread come to its end: one that is in C++ when Python exits aborts the process."""
    state.is_over.set()
    if thread is not threading.current_thread():
        thread.join(5.0)


def _beat(store: Any, board: _Board, state: _State, abort: Callable[[], None]) -> None:
    """Tell and listen, until it is over."""
    heard_at, num_failed = 0.0, 0
    store.set_timeout(timedelta(seconds=5))
    while not state.is_over.wait(BEAT):
        try:
            board.beat()
            if state.heard is None:
                state.heard = board.read_failure() or board.find_stuck()
            num_failed = 0
        except Exception:
            num_failed += 1
            if num_failed > 3:  # the store is gone: the run has failed, or has come to its end
                state.is_over.set()
                return
        if state.heard is None:
            continue
        heard_at = heard_at or time.monotonic()
        seconds = time.monotonic() - heard_at
        # A process that raises by itself may go on, and needs its communicators.
        if seconds > 2 * BEAT and state.claim_abort():
            abort()
        if seconds > GRACE:
            sys.stderr.write(f"rank {board.rank}: ends, since a rank has failed: {state.heard}\n")
            sys.stderr.flush()
            os._exit(1)
