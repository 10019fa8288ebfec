"""Ctrl-C that waits for the end of a step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stop:
    """Whether somebody has asked to stop."""

    signal: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether it is time to save and leave."""
        return self.signal is not None


@contextmanager
def stopping() -> Iterator[Stop]:
    """Take note of SIGINT, SIGTERM and SIGHUP; a second one interrupts at once."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.signal = number
        if os.isatty(2):  # not by print, which may be what was interrupted
            end = b"stopping after this update, or evaluation; once more ends it at once"
            os.write(2, b"\nredivider: " + end + b"\n")

    try:
        before = {each: signal.signal(each, note) for each in SIGNALS}
    except ValueError:  # only the main thread may
        before = {}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
