"""Environment of a process that torchrun has started. No torch here."""

import os


def is_last_rank() -> bool:
    """Return whether this process prints for all: the last one, or the only one."""
    if "RANK" not in os.environ:
        return True
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def attempt() -> str:
    """Return a name for this attempt of torchrun."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
