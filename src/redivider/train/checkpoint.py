"""Checkpoints of a run: each whole or not there, the last two kept."""

import logging
import shutil
from pathlib import Path
from typing import Any

from redivider.pipeline.state import StateError, read_state, write_state
from redivider.train.errors import TrainError

logger = logging.getLogger("redivider")

NUM_KEPT = 2


class Checkpoints:
    """The states of a run, by the number of micro-batches that they have seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a state beside the others, then let the oldest go."""
        try:
            write_state(self._folder / f"step-{step:09}", state)
        except OSError as error:
            kept = self._found()
            left = f"{kept[-1].name} is still there" if kept else "there is none yet"
            raise TrainError(
                f"cannot write a checkpoint to {self._folder} ({error.strerror or error}); make "
                f"room there and resume: {left}"
            ) from None
        for old in self._found()[:-NUM_KEPT]:
            shutil.rmtree(old)

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """The last step whose state is undamaged, and that state; None if there never was one."""
        found = self._found()
        for path in reversed(found):
            try:
                return int(path.name.removeprefix("step-")), read_state(path)
            except StateError as error:
                logger.warning("passed over: %s", error)
        if found:
            raise TrainError(
                f"all checkpoints in {self._folder} are damaged; train anew in another folder"
            )
        return None

    def clean(self) -> None:
        """Remove what a killed process has begun to write."""
        for path in self._folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _found(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))
