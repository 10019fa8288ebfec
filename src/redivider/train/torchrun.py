"""Environment variables that torchrun sets for its processes. No torch here."""

import os


def num_processes() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_restart() -> bool:
    """Return whether torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def run_id() -> str:
    """Return the id of the torchrun job, which all its restarts share."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
