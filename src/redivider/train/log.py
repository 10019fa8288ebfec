"""What a run leaves to read: a JSON object a line, and the same curves for TensorBoard."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from redivider.train.folder import write_whole, writing
from redivider.train.runs import LOG, parse_row

CURVES = {
    "train": ("loss", "accuracy", "lr", "samples_per_second"),
    "evaluate": ("loss", "accuracy"),
}


class Log:
    """The log of a run; lines are on disk when `write` returns.

    Args:
        folder: Of the run.
        since: Go on after this step: lines of later ones, which a stopped run has left, are gone.
            None begins anew.
    """

    def __init__(self, folder: Path, *, since: int | None) -> None:
        self._path = folder / LOG
        self._folder = folder
        self._since = -1 if since is None else since
        if self._path.exists():
            self._keep(lambda row: int(row.get("step", 0)) <= self._since)
        with writing(folder):
            self._file = self._path.open("a")
        self._board: Any = None

    def write(self, kind: str, **row: Any) -> None:
        """Add a line."""
        plain = {name: _plain(value) for name, value in row.items()}
        with writing(self._folder):
            self._file.write(json.dumps({"kind": kind, **plain}) + "\n")
            self._file.flush()
            for name in CURVES.get(kind, ()):
                if plain.get(name) is not None:
                    self._tensorboard().add_scalar(f"{kind}/{name}", plain[name], row["step"])

    def close(self) -> None:
        """Close all files."""
        with suppress(OSError):  # of a full disk, which was told when a line was written
            self._file.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()

    def _tensorboard(self) -> Any:
        if self._board is None:
            self._board = _make_board(self._path.parent / "tensorboard", self._since + 1)
        return self._board

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Write the file anew with some of its lines."""
        lines = []
        for line in self._path.read_bytes().decode(errors="replace").split("\n"):
            row = parse_row(line)
            if row is None:
                break  # the end, or half a line, the last one of a killed run
            if wanted(row):
                lines.append(line)
        write_whole(self._path, "".join(f"{line}\n" for line in lines))


class NoLog:
    """Of a process that writes none."""

    def write(self, kind: str, **row: Any) -> None:
        """Let it be."""

    def close(self) -> None:
        """Nothing is open."""


class _NoBoard:
    """Where tensorboard is not installed."""

    def add_scalar(self, *given: Any) -> None:
        pass

    def close(self) -> None:
        pass


def _make_board(folder: Path, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return _NoBoard()
    # Later points of a run that was stopped are not shown.
    writer: Any = SummaryWriter
    return writer(str(folder), purge_step=purge_step, flush_secs=10)


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
