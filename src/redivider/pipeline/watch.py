"""Who is to blame: a thread that tells others what this process does, and hears of their failures.

Every half second each process writes into the store that all share whether it works or for whom it
waits. Whoever raises writes why. Whoever waits for too long follows who waits for whom to a process
that does not wait for anyone, or whose thread has stopped to write, and blames that one. The first
reason is everybody's. A process that hears of one and does not come to an end by itself, since it
hangs, is ended.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from redivider.errors import PipelineError

BEAT = 0.5  # seconds
GRACE = 10.0  # seconds for a process that has heard of a failure to end by itself
FAILURE = "failure"


class Watch:
    """What this process knows of the others, and they of it.

    Args:
        store: Which all processes share.
        rank: Of this process.
        ranks: Of all.
        timeout: Seconds to wait for another process.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self._store, self._rank, self._ranks, self._timeout = store, rank, ranks, timeout
        self._state = _State()
        own = store.clone()  # a connection of its own: others may block the first
        thread = threading.Thread(target=_beat, args=(own, rank, self._state), daemon=True)
        thread.start()
        weakref.finalize(self, self._state.is_over.set)

    @contextmanager
    def waiting(self, rank: int | None) -> Iterator[None]:
        """Surround a wait for a rank, or for all."""
        self._state.waits_for = -1 if rank is None else rank
        try:
            yield
        finally:
            self._state.waits_for = None

    def verify_well(self) -> None:
        """Raise if another process has failed."""
        if self._state.heard is not None:
            self.close()
            raise PipelineError(self._state.heard)

    def publish(self, reason: str) -> str:
        """Tell all why this process cannot go on; the first reason is everybody's."""
        try:
            said: bytes = self._store.compare_set(FAILURE, "", reason)
        except RuntimeError:  # the store is gone with the process that held it
            return reason
        return said.decode() or reason

    def find_reason(self, rank: int | None, error: str) -> str:
        """Why a wait for a rank has failed: what somebody has said, or what can be seen."""
        try:
            return self._find_reason(rank, error)
        except RuntimeError:
            return f"rank {self._rank}: {self._lost(rank)}, and so has the store: {error}"

    def close(self) -> None:
        """Stop watching: this process is about to end."""
        self._state.is_over.set()

    def _find_reason(self, rank: int | None, error: str) -> str:
        has_timed_out = "imed out" in error or "timeout" in error.lower()
        deadline = time.monotonic() + 2.0  # who has died says nothing; who raised may still
        while not has_timed_out and time.monotonic() < deadline:
            if self._store.check([FAILURE]):
                break
            time.sleep(0.05)
        if self._store.check([FAILURE]):
            return str(self._store.get(FAILURE).decode())
        if has_timed_out:
            return self.publish(self._blame(rank))
        return self.publish(f"rank {self._rank}: {self._lost(rank)} ({error})")

    def _lost(self, rank: int | None) -> str:
        who = "another rank" if rank is None else f"rank {rank}"
        return f"the connection to {who} has broken: it has ended, or its machine has"

    def _blame(self, rank: int | None) -> str:
        before = {each: self._read(each) for each in self._ranks}
        time.sleep(4 * BEAT)
        now = {each: self._read(each) for each in self._ranks}
        silent = [
            each for each in self._ranks if each != self._rank and before[each][0] == now[each][0]
        ]
        if silent:
            names = ", ".join(map(str, silent))
            return f"rank {names}: gives no sign of life, and was waited for {self._timeout:g} s"
        culprit, seen = self._rank if rank is None else rank, {self._rank}
        while culprit not in seen and now[culprit][1] is not None and now[culprit][1] >= 0:
            seen.add(culprit)
            culprit = now[culprit][1]
        if rank is None:  # all were waited for: blame one that does not wait
            culprit = next((each for each in self._ranks if now[each][1] is None), culprit)
        doing = now[culprit][2]
        return (
            f"rank {culprit} ({doing}): was waited for {self._timeout:g} s, longer than `timeout`; "
            "it hangs, or its work takes that long"
        )

    def _read(self, rank: int) -> tuple[int, Any, str]:
        """A rank's beats so far, for whom it waits, and what it says that it does."""
        if not self._store.check([f"rank {rank}"]):
            return 0, None, "has not begun"
        beats, waits_for, doing = self._store.get(f"rank {rank}").decode().split(" ", 2)
        return int(beats), None if waits_for == "-" else int(waits_for), doing

    def note(self, doing: str) -> None:
        """Say what this process does."""
        self._state.doing = doing


class _State:
    def __init__(self) -> None:
        self.waits_for: int | None = None
        self.doing = "begins"
        self.heard: str | None = None
        self.is_over = threading.Event()


def _beat(store: Any, rank: int, state: _State) -> None:
    """Tell and listen, until it is over."""
    beats, heard_at = 0, 0.0
    store.set_timeout(timedelta(seconds=5))
    while not state.is_over.wait(BEAT):
        beats += 1
        try:
            waits_for = "-" if state.waits_for is None else state.waits_for
            store.set(f"rank {rank}", f"{beats} {waits_for} {state.doing}")
            if state.heard is None and store.check([FAILURE]):
                state.heard, heard_at = store.get(FAILURE).decode(), time.monotonic()
        except Exception:
            return  # the store is gone, and with it the run
        if state.heard is not None and time.monotonic() - heard_at > GRACE:
            sys.stderr.write(f"rank {rank}: ends, since another rank has failed: {state.heard}\n")
            sys.stderr.flush()
            os._exit(1)
