"""Ticks as text and as a Chrome trace, planned from schedule.py or with measured times."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from redivider.pipeline.schedule import Action, actions, num_ticks


def draw(
    stages: int,
    *,
    latency: int = 1,
    ticks: int | None = None,
    num_microbatches: int | None = None,
) -> str:
    """Draw stages down and ticks across: F and B of each micro-batch.

    Args:
        stages: Number of stages.
        latency: Ticks that a message travels.
        ticks: How many to draw; all of them if the number of micro-batches is given.
        num_microbatches: How many enter; without it they never end.
    """
    if ticks is None:
        if num_microbatches is None:
            raise ValueError("give ticks or num_microbatches: a pipeline that is fed has no end")
        ticks = num_ticks(num_microbatches, stages, latency)
    grid = [[""] * ticks for _ in range(stages)]
    for t in range(ticks):
        for kind, stage, microbatch in actions(t, stages, latency, num_microbatches):
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
    stages: int, *, latency: int = 1, num_microbatches: int, backward: float = 3.0
) -> dict[Action, tuple[float, float]]:
    """Start and end of every action if a forward takes 1, and all stages are alike."""
    length = 1.0 + backward
    spans = {}
    for t in range(num_ticks(num_microbatches, stages, latency)):
        for action in actions(t, stages, latency, num_microbatches):
            start = t * length + (0.0 if action.kind == "F" else 1.0)
            spans[action] = (start, start + (1.0 if action.kind == "F" else backward))
    return spans


class Observed(Protocol):
    """A pipeline, as far as watching it goes."""

    observer: Callable[[Action, float], None] | None


@contextmanager
def measured_spans(pipe: Observed) -> Iterator[dict[Action, tuple[float, float]]]:
    """Measure every action that a pipeline does inside: start and end in seconds.

        with timeline.measured_spans(pipe) as spans:
            pipe.step(images, targets)
        timeline.write_chrome_trace("trace.json", spans)

    On a GPU these are the times at which the host has queued the work, not those of the work.
    """
    spans: dict[Action, tuple[float, float]] = {}
    before = pipe.observer
    pipe.observer = lambda action, start: spans.update({action: (start, time.perf_counter())})
    try:
        yield spans
    finally:
        pipe.observer = before


def write_chrome_trace(path: str | Path, spans: Mapping[Action, tuple[float, float]]) -> None:
    """Write spans, in seconds, for chrome://tracing or Perfetto: a row for each stage."""
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
    Path(path).write_text(json.dumps({"traceEvents": _named(spans) + events}))


def _named(spans: Iterable[Action]) -> list[dict[str, object]]:
    return [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": j, "args": {"name": f"stage {j}"}}
        for j in sorted({action.stage for action in spans})
    ]
