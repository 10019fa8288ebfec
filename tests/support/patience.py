"""Time limits that scale with the machine, so that they end what hangs and not what is slow."""

import os
import time

IDLE = 0.055  # seconds that `_work` takes on an idle core of 2.5 GHz
SPARE = 2.0  # load may come after the measurement


def seconds(number: float) -> float:
    """Return a limit that is `number` seconds on an ordinary, idle machine."""
    return number * patience()


def patience() -> float:
    """Return the factor of all limits; measured once, and inherited by every process of a run."""
    if "REDIVIDER_PATIENCE" not in os.environ:
        os.environ["REDIVIDER_PATIENCE"] = f"{SPARE * max(1.0, _measure() / IDLE):.2f}"
    return float(os.environ["REDIVIDER_PATIENCE"])


def _measure() -> float:
    """Return the wall-clock seconds of a fixed piece of work, others' load included."""
    start = time.perf_counter()
    for _ in range(8):
        _work()
    return (time.perf_counter() - start) / 8


def _work() -> int:
    return sum(i * i for i in range(600_000))
