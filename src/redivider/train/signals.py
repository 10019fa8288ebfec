"""Signals that stop a run at the end of an update."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stop:
    """Request to stop, set by a signal."""

    signal: int | None = None

    @property
    def is_requested(self) -> bool:
        """Whether the run should save and stop."""
        return self.signal is not None


@contextmanager
def catch_signals() -> Iterator[Stop]:
    """Record SIGINT, SIGTERM or SIGHUP; a second signal interrupts at once."""
    stop = Stop()

    def record(number: int, frame: FrameType | None) -> None:
        if stop.is_requested:
            raise KeyboardInterrupt
        stop.signal = number
        if os.isatty(2):  # not with print, which may be what was interrupted
            text = b"stopping after this update, or evaluation; once more ends it at once"
            os.write(2, b"\nredivider: " + text + b"\n")

    try:
        handlers = {number: signal.signal(number, record) for number in SIGNALS}
    except ValueError:  # only the main thread may set handlers
        handlers = {}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
