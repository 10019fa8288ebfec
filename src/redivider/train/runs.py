"""Runs as their folders tell them.

A run is a folder with `recipe.json`, what was asked for, and `log.jsonl`, what happened: an object
a line, each with a kind; unknown kinds are ignored.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from redivider.train.errors import TrainError

RECIPE = "recipe.json"
LOG = "log.jsonl"
Row: TypeAlias = dict[str, Any]
_KINDS = ("start", "train", "evaluate", "memory", "quality", "timeline", "end")


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it: the rows of the log by kind, in the order of time."""

    folder: Path
    recipe: Row
    start: list[Row]
    train: list[Row]
    evaluate: list[Row]
    memory: list[Row]
    quality: list[Row]
    timeline: list[Row]
    end: list[Row]

    @property
    def name(self) -> str:
        """Of its recipe, or else of its folder."""
        return str(self.recipe.get("name") or self.folder.name)

    @property
    def metric(self) -> str:
        """What evaluations are judged by: "accuracy" where there is one, or "loss"."""
        found = numbers([*self.evaluate, *self.end], "accuracy")
        return "accuracy" if any(map(isfinite, found)) else "loss"

    def held(self, what: str) -> list[float]:
        """Bytes of "activations" or copies of "weights", by stage."""
        return numbers(self.memory[-1].get("stages") or [] if self.memory else [], what)


def numbers(rows: Sequence[Row], field: str) -> list[float]:
    """A field of rows; NaN where it is null, missing, or no finite number."""
    found = (row.get(field) for row in rows)
    return [float(each) if _is_number(each) else nan for each in found]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value)


def read_run(folder: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        TrainError: A ValueError, if it is not the folder of a run or its log is damaged. The last
            line alone may be: the run was killed while it wrote.
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
        wanted = f"give the folder of a run, which has {RECIPE} and {LOG}"
        raise TrainError(f"cannot read {path} ({error.strerror}); {wanted}") from None


def _rows(path: Path) -> Iterator[Row]:
    lines = _read(path).rstrip().split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            yield row
        elif number < len(lines):
            raise TrainError(f"{path}: line {number} is no JSON object; mend or delete the line")


def parse_row(text: bytes | str) -> Row | None:
    """A JSON object, or None if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
