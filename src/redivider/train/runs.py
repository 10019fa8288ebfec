"""Runs, read from their folders.

The folder of a run has its recipe in `recipe.json` and its log in `log.jsonl`. The log has one JSON
object per line, each with a kind; unknown kinds are ignored.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from redivider.errors import did_you_mean
from redivider.train.errors import TrainError

RUNS = Path("runs")
"""Folder of runs, unless another one is set."""
RECIPE = "recipe.json"
LOG = "log.jsonl"
WEIGHTS = "model.safetensors"
Row: TypeAlias = dict[str, Any]
_KINDS = ("start", "train", "evaluate", "memory", "depth", "quality", "timeline", "end")


@dataclass(frozen=True)
class Run:
    """Recipe and log of a run; the rows of the log are grouped by kind, in order of time."""

    folder: Path
    recipe: Row
    start: list[Row]
    train: list[Row]
    evaluate: list[Row]
    memory: list[Row]
    depth: list[Row]
    quality: list[Row]
    timeline: list[Row]
    end: list[Row]

    @property
    def name(self) -> str:
        """Name of the recipe, or else of the folder."""
        return str(self.recipe.get("name") or self.folder.name)

    @property
    def metric(self) -> str:
        """Metric of the evaluations: "accuracy" if the log has any, else "loss"."""
        accuracies = numbers([*self.evaluate, *self.end], "accuracy")
        return "accuracy" if any(map(isfinite, accuracies)) else "loss"

    def held_by_depth(self) -> dict[int, int]:
        """Return the bytes of activations that the method holds, by the depth of the model."""
        pairs = zip(numbers(self.depth, "depth"), numbers(self.depth, "activations"), strict=True)
        return {int(depth): int(size) for depth, size in pairs if isfinite(depth + size)}

    def held(self, field: str) -> list[float]:
        """Return the bytes of "activations" or copies of "weights" that each stage holds."""
        return numbers(self.memory[-1].get("stages") or [] if self.memory else [], field)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the folder if it is a run, else all runs below it, in the order of their beginning."""
    folder = Path(folder)
    runs = [path.parent for path in folder.rglob(LOG) if (path.parent / RECIPE).exists()]
    runs.sort(key=lambda run: ((run / RECIPE).stat().st_mtime, run))
    if folder in runs:
        return [folder]
    if not runs:
        raise no_run(folder)
    return runs


def no_run(folder: Path) -> TrainError:
    """Return the error for a folder that holds no run."""
    places = {folder.parent, RUNS}
    near = {str(path.parent) for place in places for path in place.glob(f"*/{RECIPE}")}
    hint = did_you_mean(str(folder), sorted(near), "`redivider train NAME` makes one")
    return TrainError(f"there is no run in {folder}; {hint}")


def numbers(rows: Sequence[Row], field: str) -> list[float]:
    """Return a field of all rows; NaN where it is null, missing, or not a finite number."""
    values = (row.get(field) for row in rows)
    return [float(value) if _is_number(value) else nan for value in values]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value)


def read_run(folder: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        TrainError: A ValueError, if this is not the folder of a run or its log is damaged. An
            incomplete last line is ignored: the run was killed while it wrote it.
    """
    folder = Path(folder)
    path = folder / RECIPE
    recipe = parse_row(_read(path))
    if recipe is None:
        raise TrainError(f"{path} is no JSON object; restore it, or leave the run out")
    rows: dict[str, list[Row]] = {kind: [] for kind in _KINDS}
    for row in _rows(folder / LOG):
        rows.get(str(row.get("kind")), []).append(row)
    return Run(folder, recipe, **rows)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = f"give the folder of a run, which has {RECIPE} and {LOG}"
        raise TrainError(f"cannot read {path} ({error.strerror}); {remedy}") from None


def _rows(path: Path) -> Iterator[Row]:
    lines = _read(path).rstrip().split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            yield row
        elif number < len(lines):
            raise TrainError(f"{path}: line {number} is no JSON object; repair or delete it")


def parse_row(text: bytes | str) -> Row | None:
    """Parse a JSON object; return None if the text is not one."""
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
