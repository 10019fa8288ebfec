"""Checkpoints of a run: each whole or not there, the last two kept."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redivider.pipeline.checkpoint.files import Alone, StateError, Writers, read_state, write_state
from redivider.train.crew import said_once
from redivider.train.errors import TrainError

logger = logging.getLogger("redivider")

NUM_KEPT = 2


class Checkpoints:
    """The states of a run, by the number of micro-batches that they have seen."""

    def __init__(self, folder: Path, writers: Writers | None = None) -> None:
        self._folder = folder
        self._writers = writers or Alone()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a state beside the others, then let the oldest go."""
        path = self._folder / f"step-{step:09}"
        if path.exists():
            return  # written or read by this process: the same state
        try:
            write_state(path, state, self._writers)
        except OSError as error:
            kept = self._found()
            left = f"{kept[-1].name} is still there" if kept else "there is none yet"
            raise said_once(
                TrainError(
                    f"cannot write a checkpoint to {self._folder} ({error.strerror or error}); "
                    f"make room there and resume: {left}"
                )
            ) from None
        if self._writers.is_first:
            for old in self._found()[:-NUM_KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def load(
        self, wanted: Callable[[tuple[Any, ...]], bool] = lambda path: True
    ) -> dict[str, Any] | None:
        """The last state that is undamaged; None if there never was one.

        What is damaged, and what a killed process has begun to write, is removed. Of a state, what
        is `wanted` under its keys is read.
        """
        found = self._found()
        for path in reversed(found):
            try:
                state = read_state(path, wanted, self._writers)
            except StateError as error:
                if self._writers.is_first:
                    logger.warning("passed over: %s", error)
                continue
            broken = found[found.index(path) + 1 :]
            if self._writers.is_first:
                for each in (*broken, *self._folder.glob(".step-*")):
                    shutil.rmtree(each, ignore_errors=True)
            return state
        if found:
            raise said_once(
                TrainError(
                    f"all checkpoints in {self._folder} are damaged; train anew in another folder"
                )
            )
        return None

    def _found(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))
