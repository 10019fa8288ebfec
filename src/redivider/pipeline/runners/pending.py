"""Transfers that the GPU waits for, while the host runs ahead.

The GPU writes how far it has come to memory of the host (progress.py), because a CUDA call may
block for as long as the GPU waits. For example, the first launch of a kernel loads it, which waits
for running kernels and holds a lock of the driver. If the transfer's peer has died, that lasts
until the communicator is aborted. So the thread that aborts makes no CUDA call before.

A call that blocks may also keep the interpreter's lock, and then no thread of Python runs. So while
transfers are pending, a timer that needs no lock exits the process if nobody restarts it.
"""

import time
from collections import deque
from typing import NamedTuple

from redivider.pipeline.runners.process_group import Communicators
from redivider.pipeline.runners.progress import Mark

BEAT = 0.5  # seconds between two examinations, and between two heartbeats
TIMED_OUT = "timed out"
BROKEN = "broken"


class PendingTransfer(NamedTuple):
    """Transfer with a rank, or with all, between two points of the GPU's work."""

    rank: int | None
    start: Mark
    """Passed when the GPU has computed what precedes the transfer."""
    end: Mark


class Pending:
    """Transfers that have begun, in their order, and whether they move.

    Args:
        communicators: Communicators that transfer.
        limit: Seconds without an examination after which the process exits.
    """

    def __init__(self, communicators: Communicators, limit: float) -> None:
        self._communicators, self._limit = communicators, limit
        self.has_broken = False
        """Whether a communicator has failed."""
        self._transfers: deque[PendingTransfer] = deque()
        self._moved_at = time.monotonic()
        self._has_timer = self._is_over = False

    def add(self, transfer: PendingTransfer) -> None:
        """Add a transfer."""
        if not self._transfers:
            self._restart_timer()
        self._transfers.append(transfer)

    def examine(self) -> None:
        """Remove the transfers that have completed, and restart or stop the timer."""
        if self._communicators.have_failed():
            self.has_broken = True
        if not self._transfers:
            return
        self._restart_timer()
        now = time.monotonic()
        while self._transfers and self._transfers[0].end.has_passed():
            self._transfers.popleft()
            self._moved_at = now
        if not self._transfers:
            self._stop_timer()
        elif not self._transfers[0].start.has_passed():
            self._moved_at = now  # the GPU computes, and does not wait

    def is_busy(self) -> bool:
        """Return whether the GPU may wait for a transfer, or one has failed."""
        return self.has_broken or bool(self._transfers)

    def find_awaited(self) -> int | None:
        """Return the rank that the GPU has waited for during three beats; -1 for all."""
        if not self._transfers or time.monotonic() - self._moved_at <= 3 * BEAT:
            return None
        rank = self._transfers[0].rank
        return -1 if rank is None else rank

    def find_stuck(self, timeout: float) -> tuple[int | None, str] | None:
        """Return the rank that was waited for too long or whose connection broke, and which."""
        if self.has_broken:
            return self._transfers[0].rank if self._transfers else None, BROKEN
        if self._transfers and time.monotonic() - self._moved_at > timeout:
            return self._transfers[0].rank, TIMED_OUT
        return None

    def close(self) -> None:
        """Cancel the exit timer for good, whatever is pending."""
        self._is_over = True
        self._stop_timer()

    def _restart_timer(self) -> None:
        if not self._is_over:
            self._has_timer = True
            self._communicators.exit_later(self._limit)

    def _stop_timer(self) -> None:
        if self._has_timer:  # else it is another pipeline's
            self._has_timer = False
            self._communicators.cancel_exit()
