"""Log of a run: one JSON object per line, and the same curves for TensorBoard."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from redivider.train.run_folder import write_whole, writing
from redivider.train.runs import LOG, parse_row

CURVES = {
    "train": ("loss", "accuracy", "lr", "samples_per_second", "memory"),
    "evaluate": ("loss", "accuracy"),
    "quality": ("cosine", "ratio", "rebuilt_error"),
}


class Log:
    """Log of a run; lines are on disk when `write` returns.

    Args:
        folder: Folder of the run.
        resume_step: Step to resume from; lines of later steps, which the stopped run has left, are
            deleted. None starts a new log.
    """

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        self._path = folder / LOG
        self._folder = folder
        self._resume_step = -1 if resume_step is None else resume_step
        if self._path.exists():
            self._truncate()
        with writing(folder):
            self._file = self._path.open("a")
        self._board: Any = None

    def write(self, kind: str, **row: Any) -> None:
        """Append a line."""
        plain = {name: _plain(value) for name, value in row.items()}
        with writing(self._folder):
            self._file.write(json.dumps({"kind": kind, **plain}) + "\n")
            self._file.flush()
            for tag, value in _scalars(kind, plain):
                self._tensorboard().add_scalar(tag, value, plain.get("microbatch", plain["step"]))

    def close(self) -> None:
        """Close all files."""
        with suppress(OSError):  # of a full disk, which `write` has reported
            self._file.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()

    def _tensorboard(self) -> Any:
        if self._board is None:
            self._board = _make_board(self._path.parent / "tensorboard", self._resume_step + 1)
        return self._board

    def _truncate(self) -> None:
        """Rewrite the file without the lines of steps after the one to resume from."""
        lines = []
        for line in self._path.read_bytes().decode(errors="replace").split("\n"):
            row = parse_row(line)
            if row is None:
                break  # the end, or an incomplete last line of a killed run
            if int(row.get("step", 0)) <= self._resume_step:
                lines.append(line)
        write_whole(self._path, "".join(f"{line}\n" for line in lines))


class NoLog:
    """Log of a process that writes none."""

    def write(self, kind: str, **row: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _NoBoard:
    """Stand-in for a SummaryWriter where tensorboard is not installed."""

    def add_scalar(self, *args: Any) -> None:
        pass

    def close(self) -> None:
        pass


def _make_board(folder: Path, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return _NoBoard()
    # TensorBoard then hides the later points that a stopped run has left.
    writer: Any = SummaryWriter
    return writer(str(folder), purge_step=purge_step, flush_secs=10)


def _scalars(kind: str, row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the tags and values of a row for TensorBoard; memory is in MiB."""
    stage = f"/stage{row['stage']}" if "stage" in row else ""
    for name in CURVES.get(kind, ()):
        if row.get(name) is not None:
            is_memory = name == "memory"
            tag = f"{kind}/{name}_mib" if is_memory else f"{kind}/{name}{stage}"
            yield tag, row[name] / 2**20 if is_memory else row[name]
    if kind == "memory":
        sizes = {held["stage"]: held["activations"] / 2**20 for held in row["stages"]}
        yield "memory/activations_mib", sum(sizes.values())
        if len(sizes) > 1:
            yield from ((f"memory/activations_mib/stage{j}", size) for j, size in sizes.items())


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no NaN: None instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
