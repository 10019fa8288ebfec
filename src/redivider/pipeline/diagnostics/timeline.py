"""Timelines of ticks, planned from the schedule or measured: as text, picture or Chrome trace."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from colorsys import hls_to_rgb
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from redivider.errors import require
from redivider.pipeline.schedule import Action, Latency, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_HEIGHT = 16.0
"""Inches of the rows of a picture."""
MAX_LABELLED = 64
"""Stages whose rows are high enough for text."""
Spans: TypeAlias = dict[Action, tuple[float, float]]


def draw(
    stages: int,
    *,
    latency: Latency = 1,
    ticks: int | None = None,
    num_microbatches: int | None = None,
) -> str:
    """Draw F and B of every micro-batch as text, with stages down and ticks across.

    Args:
        stages: Number of stages.
        latency: Ticks that a message travels.
        ticks: Number of ticks to draw; all of them by default, if `num_microbatches` is set.
        num_microbatches: Number of micro-batches that enter; None for no end.
    """
    schedule = Schedule(stages, latency)
    if ticks is None:
        if num_microbatches is None:
            raise ValueError("give ticks or num_microbatches: a pipeline that is fed has no end")
        ticks = schedule.num_ticks(num_microbatches)
    grid = [[""] * ticks for _ in range(stages)]
    for t in range(ticks):
        for kind, stage, microbatch in schedule.actions(t, num_microbatches):
            grid[stage][t] = f"{grid[stage][t]} {kind}{microbatch}".strip()
    width = max([len(cell) for row in grid for cell in row] + [len(str(ticks))])
    margin = len(f"stage {stages - 1}")
    rows = [("t", [str(t) for t in range(ticks)])]
    rows += [(f"stage {stage}", row) for stage, row in enumerate(grid)]
    return "\n".join(
        f"{name:<{margin}}  {' '.join(f'{cell:<{width}}' for cell in cells)}".rstrip()
        for name, cells in rows
    )


def planned_spans(
    stages: int, *, latency: Latency = 1, num_microbatches: int, backward: float = 3.0
) -> Spans:
    """Return start and end of every action, if a forward takes 1 and all stages are alike.

    Args:
        stages: Number of stages.
        latency: Ticks that a message travels.
        num_microbatches: Number of micro-batches that enter.
        backward: Time of a backward.
    """
    schedule, length = Schedule(stages, latency), 1.0 + backward
    spans: Spans = {}
    free_at = [0.0] * stages
    for t in range(schedule.num_ticks(num_microbatches)):
        for action in schedule.actions(t, num_microbatches):
            kind, stage, n = action
            if schedule.num_groups == 1:  # in lock step
                start = t * length + (0.0 if kind == "F" else 1.0)
            else:  # as soon as the stage is free and the message has come
                sender = Action(kind, stage - 1 if kind == "F" else stage + 1, n)
                start = max(free_at[stage], spans.get(sender, (0.0, 0.0))[1])
            free_at[stage] = start + (1.0 if kind == "F" else backward)
            spans[action] = (start, free_at[stage])
    return spans


def draw_spans(spans: Spans, width: int = 120) -> str:
    """Draw spans as text, with stages down and time across, as far as they fit.

    A column is as long as the shortest action. A longer action continues as dashes.
    """
    if not spans:
        return ""
    column = min((end - start for start, end in spans.values() if end > start), default=1.0)
    first = min(start for start, _ in spans.values())
    size = 1 + max(len(f"{kind}{n}") for kind, _, n in spans)
    stages = 1 + max(action.stage for action in spans)
    margin = len(f"stage {stages - 1}")
    num = (width - margin) // size
    grid = [[""] * num for _ in range(stages)]
    for (kind, stage, n), times in spans.items():
        start, end = (round((time - first) / column) for time in times)
        for place in range(start, min(max(end, start + 1), num)):
            grid[stage][place] = "-" * (size - 1) if place > start else f"{kind}{n}"
    return "\n".join(
        f"{f'stage {j}':<{margin}}  {' '.join(f'{cell:<{size - 1}}' for cell in row)}".rstrip()
        for j, row in enumerate(grid)
    )


@dataclass(frozen=True)
class Timeline:
    """F and B of every micro-batch: planned by `Pipeline.timeline`, or simulated."""

    text: str
    """Picture with stages down and time across."""
    spans: Spans
    """Start and end of every action."""
    unit: str
    """Label of the time axis."""

    @classmethod
    def plan(cls, schedule: Schedule, num_microbatches: int) -> "Timeline":
        """Return the plan of a schedule, in which a forward takes 1 and a backward 3."""
        stages, latency = schedule.num_stages, schedule.latency
        text = draw(stages, latency=latency, num_microbatches=num_microbatches)
        spans = planned_spans(stages, latency=latency, num_microbatches=num_microbatches)
        return cls(text, spans, "time, in forwards of a stage")

    def __str__(self) -> str:
        return self.text

    def plot(self, path: str | Path) -> None:
        """Draw a picture; the ending of the path chooses its format."""
        plot(path, self.spans, unit=self.unit)

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or Perfetto, with a second for a unit of time."""
        write_chrome_trace(path, self.spans)


def plot(path: str | Path, spans: Spans, unit: str = "seconds") -> None:
    """Draw spans as a picture: stages down, time across, a colour for every micro-batch.

    Args:
        path: File, whose ending chooses the format.
        spans: Start and end of every action.
        unit: Label of the time axis.
    """
    if not spans:
        raise ValueError("there is nothing to draw: no action was run")
    verify_picture(path)
    stages = 1 + max(action.stage for action in spans)
    figures = require("matplotlib.figure", "a plot")
    figure = figures.Figure((12, 1 + min(0.4 * stages, MAX_HEIGHT)), layout="constrained")
    axis = figure.subplots()
    paint_spans(axis, spans)
    axis.set(xlabel=unit, ylabel="stage", title="forwards pale, backwards strong")
    figure.savefig(path)


def verify_picture(path: str | Path) -> None:
    """Refuse a file that a picture cannot be written to."""
    known = require("matplotlib.backend_bases", "a plot").FigureCanvasBase.filetypes
    path = Path(path)
    ending = path.suffix.lower().lstrip(".")
    if ending and ending not in known:
        raise ValueError(f"{path.name} must end in one of {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")


def paint_spans(axis: "Axes", spans: Spans) -> None:
    """Draw spans on the axis of a plot that is 12 inches wide; the first begins at 0."""
    stages = 1 + max(action.stage for action in spans)
    first = min(start for start, _ in spans.values())
    length = max(end for _, end in spans.values()) - first or 1.0
    rows: dict[int, list[tuple[float, float, tuple[float, ...]]]] = {}
    for (kind, stage, microbatch), (start, end) in spans.items():
        # Steps of the golden ratio give neighbours distinct hues, for any number of micro-batches.
        colour = hls_to_rgb(microbatch * 0.618034 % 1, 0.86 if kind == "F" else 0.68, 0.65)
        left, size = start - first, end - start
        rows.setdefault(stage, []).append((left, size, colour))
        text = f"{kind}{microbatch}"
        # A text needs some of the width, and of the height.
        if stages <= MAX_LABELLED and size / length > 0.007 * len(text):
            centre = left + size / 2, stage
            axis.text(*centre, text, ha="center", va="center", size=8, color="#111111")
    for stage, row in rows.items():
        bars, colours = [(left, size) for left, size, _ in row], [colour for *_, colour in row]
        axis.broken_barh(
            bars, (stage - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.5
        )
    axis.set(xlim=(0, length), ylim=(stages - 0.5, -0.5))
    axis.set_yticks(range(0, stages, ceil(stages / 24)))


class Observed(Protocol):
    """Pipeline that reports its actions to an observer."""

    observer: Callable[[Action, float], None] | None


@contextmanager
def measured_spans(pipe: Observed) -> Iterator[Spans]:
    """Measure start and end, in seconds, of every action that a pipeline runs in a `with` block.

        with timeline.measured_spans(pipe) as spans:
            pipe.step(images, targets)
        timeline.write_chrome_trace("trace.json", spans)

    On a GPU these are the times at which the host queues the work, not those at which it runs.
    """
    spans: Spans = {}
    before = pipe.observer
    pipe.observer = lambda action, start: spans.update({action: (start, time.perf_counter())})
    try:
        yield spans
    finally:
        pipe.observer = before


def write_chrome_trace(path: str | Path, spans: Spans) -> None:
    """Write spans in seconds as a trace for chrome://tracing or Perfetto, a row for each stage."""
    events = [
        {
            "name": f"{action.kind}{action.microbatch}",
            "cat": action.kind,
            "ph": "X",
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "pid": 0,
            "tid": action.stage,
        }
        for action, (start, end) in spans.items()
    ]
    Path(path).write_text(json.dumps({"traceEvents": _row_names(spans) + events}))


def _row_names(spans: Iterable[Action]) -> list[dict[str, object]]:
    return [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": j, "args": {"name": f"stage {j}"}}
        for j in sorted({action.stage for action in spans})
    ]
