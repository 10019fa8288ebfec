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
        self._said: str | None = None
        self.stages: dict[int, str] = {}
        """Which stages each rank has, in words."""
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
        self._said = reason
        try:
            said: bytes = self._store.compare_set(FAILURE, "", reason)
        except RuntimeError:  # the store is gone with the process that held it
            return reason
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(3 * BEAT)  # it may be this one: others must hear of it first
        return said.decode() or reason

    def find_reason(self, rank: int | None, error: str) -> PipelineError:
        """Why a wait for a rank has failed: what somebody has said, or what can be seen."""
        found = PipelineError(self._find_or_guess(rank, error))
        found.is_first = str(found) == self._said
        return found

    def _find_or_guess(self, rank: int | None, error: str) -> str:
        try:
            return self._find_reason(rank, error)
        except RuntimeError:
            if self._state.heard is not None:
                return self._state.heard
            return (
                f"{self.name(self._rank)}: {self._lost(rank)}; the store, which rank 0 or its "
                "torchrun holds, is gone, too"
            )

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
        return self.publish(f"{self.name(self._rank)}: {self._lost(rank)}")

    def _lost(self, rank: int | None) -> str:
        who = "another rank" if rank is None else self.name(rank)
        return f"the connection to {who} has broken: it has ended, or its machine has"

    def name(self, rank: int) -> str:
        """A rank, with its stages."""
        stages = self.stages.get(rank)
        return f"rank {rank} ({stages})" if stages else f"rank {rank}"

    def _blame(self, rank: int | None) -> str:
        before = {each: self._read(each) for each in self._ranks}
        time.sleep(4 * BEAT)
        now = {each: self._read(each) for each in self._ranks}
        silent = [
            each for each in self._ranks if each != self._rank and before[each][0] == now[each][0]
        ]
        if silent:
            names = ", ".join(map(self.name, silent))
            return f"{names}: gives no sign of life, and was waited for {self._timeout:g} s"
        culprit, seen = self._rank if rank is None else rank, {self._rank}
        while culprit not in seen and now[culprit][1] is not None and now[culprit][1] >= 0:
            seen.add(culprit)
            culprit = now[culprit][1]
        if rank is None:  # all were waited for: blame one that does not wait
            culprit = next((each for each in self._ranks if now[each][1] is None), culprit)
        return (
            f"{self.name(culprit)}: in {now[culprit][2]}, was waited for {self._timeout:g} s; it "
            "hangs, or its work takes longer than `timeout`"
        )

    def _read(self, rank: int) -> tuple[int, Any, str]:
        """A rank's beats so far, for whom it waits, and what it says that it does."""
        if not self._store.check([f"rank {rank}"]):
            return 0, None, "its beginning"
        beats, waits_for, doing = self._store.get(f"rank {rank}").decode().split(" ", 2)
        return int(beats), None if waits_for == "-" else int(waits_for), doing

    def note(self, doing: str) -> None:
        """Say what this process does."""
        self._state.doing = doing


class _State:
    def __init__(self) -> None:
        self.waits_for: int | None = None
        self.doing = "its beginning"
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
            return  # the store is gone: the run has failed, or has come to its end
        if heard_at and time.monotonic() - heard_at > GRACE:
            sys.stderr.write(f"rank {rank}: ends, since another rank has failed: {state.heard}\n")
            sys.stderr.flush()
            os._exit(1)
