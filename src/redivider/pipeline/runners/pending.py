"""Transfers that the GPU waits for, while the host runs ahead.

A thread of its own examines them, because a CUDA call may block for as long as the GPU waits. For
example, the first launch of a kernel loads it, which waits for running kernels and holds a lock of
the driver. If the transfer's peer has died, that lasts until the communicator is aborted. So the
thread that aborts makes no CUDA call before: it reads here how long nothing has moved.

torch keeps the interpreter's lock during a query. If one blocks, no thread of Python runs. So a
timer that needs no lock exits the process if transfers are pending and none could be examined.
"""

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

from redivider.pipeline.runners.process_group import Communicators

BEAT = 0.5  # seconds between two examinations, and between two heartbeats
TIMED_OUT = "timed out"
BROKEN = "broken"


class Pending:
    """Transfers that have begun, in their order, and whether they move.

    Args:
        communicators: Communicators that transfer.
        limit: Seconds without an examination after which the process exits.
    """

    def __init__(self, communicators: Communicators, limit: float) -> None:
        self._communicators, self._limit = communicators, limit
        self.is_doubtful = False
        """Whether a transfer is being examined, or has failed."""
        self.has_broken = False
        """Whether a transfer has failed."""
        self._transfers: deque[tuple[Any, int | None, Any]] = deque()
        self._moved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def add(self, work: Any, rank: int | None, ready: Any) -> None:
        """Add a transfer with a rank, or with all.

        Until the event `ready` has passed, the GPU does not wait: it computes.
        """
        if self._is_over.is_set():
            return
        if not self._transfers:
            self._communicators.exit_later(self._limit)
        self._transfers.append((work, rank, ready))
        if self._thread is None:
            self._thread = threading.Thread(target=self._examine_until_closed, daemon=True)
            self._thread.start()

    def examine(self) -> None:
        """Remove the transfers that have completed, and note whether one has failed."""
        now = time.monotonic()
        while self._transfers:
            work, _, ready = self._transfers[0]
            try:
                if not work.is_completed():
                    if ready is not None and not ready.query():
                        self._moved_at = now  # the GPU computes, and does not wait
                    return
                # Completed or failed: only `wait` tells. If failed, it aborts the communicator, and
                # the GPU continues with an unfilled buffer.
                self.is_doubtful = True
                work.wait(timedelta(seconds=1))
            except RuntimeError:
                self.has_broken = True  # `is_doubtful` stays set until the reason is known
                return
            self.is_doubtful = False
            self._transfers.popleft()
            self._moved_at = now
        self._moved_at = now

    def is_busy(self) -> bool:
        """Return whether the GPU may wait for a transfer, or one has failed. Make no CUDA call."""
        return self.has_broken or bool(self._transfers)

    def find_awaited(self) -> int | None:
        """Return the rank that the GPU has waited for during three beats; -1 for all."""
        if not self._transfers or time.monotonic() - self._moved_at <= 3 * BEAT:
            return None
        rank = self._first_rank()
        return -1 if rank is None else rank

    def find_stuck(self, timeout: float) -> tuple[int | None, str] | None:
        """Return the rank that was waited for too long or whose connection broke, and which."""
        if self.has_broken:
            return self._first_rank(), BROKEN
        if self._transfers and time.monotonic() - self._moved_at > timeout:
            return self._first_rank(), TIMED_OUT
        return None

    def close(self) -> None:
        """Stop the thread."""
        self._is_over.set()
        if self._thread is not None:
            self._communicators.cancel_exit()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _first_rank(self) -> int | None:
        transfers = tuple(self._transfers)  # the thread may remove some
        return transfers[0][1] if transfers else None

    def _examine_until_closed(self) -> None:
        self._communicators.prepare_thread()
        while not self._is_over.wait(BEAT) and not self.has_broken:
            if not self._transfers or self._communicators.have_failed():  # a query may block
                continue
            self._communicators.exit_later(self._limit)
            self.examine()
            if not self._transfers:
                self._communicators.cancel_exit()
