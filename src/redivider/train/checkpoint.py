"""Checkpoints of a run: each complete or absent, the last two kept."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redivider.pipeline.checkpoint.files import Alone, StateError, Writers, read_state, write_state
from redivider.train.errors import SharedError

logger = logging.getLogger("redivider")

NUM_KEPT = 2


class Checkpoints:
    """States of a run, numbered by the micro-batches that they have seen."""

    def __init__(self, folder: Path, writers: Writers | None = None) -> None:
        self._folder = folder
        self._writers = writers or Alone()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a state, then delete all but the last `NUM_KEPT`."""
        path = self._folder / f"step-{step:09}"
        if path.exists():
            return  # this process has written or read it: it is the same state
        try:
            write_state(path, state, self._writers)
        except OSError as error:
            kept = self._paths()
            left = f"{kept[-1].name} is still there" if kept else "there is none yet"
            raise SharedError(
                f"cannot write a checkpoint to {self._folder} ({error.strerror or error}); "
                f"make room there and resume: {left}"
            ) from None
        if self._writers.is_first:
            for old in self._paths()[:-NUM_KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def load(
        self, wanted: Callable[[tuple[Any, ...]], bool] = lambda path: True
    ) -> dict[str, Any] | None:
        """Return the last undamaged state, or None if there never was one.

        Damaged states and those that a killed process has left incomplete are removed. Only the
        parts of the state for whose keys `wanted` is true are read.
        """
        paths = self._paths()
        for path in reversed(paths):
            try:
                state = read_state(path, wanted, self._writers)
            except StateError as error:
                if self._writers.is_first:
                    logger.warning("passed over: %s", error)
                continue
            damaged = paths[paths.index(path) + 1 :]
            if self._writers.is_first:
                for old in (*damaged, *self._folder.glob(".step-*")):
                    shutil.rmtree(old, ignore_errors=True)
            return state
        if paths:
            raise SharedError(
                f"all checkpoints in {self._folder} are damaged; train anew in another folder"
            )
        return None

    def _paths(self) -> list[Path]:
        """List the checkpoints, oldest first."""
        return sorted(self._folder.glob("step-*"))
