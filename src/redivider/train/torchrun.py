"""What torchrun says to the processes that it has started. No torch here."""

import os


def num_processes() -> int:
    """That torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_restart() -> bool:
    """Whether it has started them before, and they have failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def run_id() -> str:
    """The same for all its attempts."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
