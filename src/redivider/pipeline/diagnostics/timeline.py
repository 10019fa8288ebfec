"""Timelines of ticks, planned from the schedule or measured: as text or as a Chrome trace."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from redivider.pipeline.schedule import Action, Latency, Schedule


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
) -> dict[Action, tuple[float, float]]:
    """Return start and end of every action, if a forward takes 1 and all stages are alike.

    Args:
        stages: Number of stages.
        latency: Ticks that a message travels.
        num_microbatches: Number of micro-batches that enter.
        backward: Time of a backward.
    """
    schedule, length = Schedule(stages, latency), 1.0 + backward
    spans: dict[Action, tuple[float, float]] = {}
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


class Observed(Protocol):
    """Pipeline that reports its actions to an observer."""

    observer: Callable[[Action, float], None] | None


@contextmanager
def measured_spans(pipe: Observed) -> Iterator[dict[Action, tuple[float, float]]]:
    """Measure start and end, in seconds, of every action that a pipeline runs in a `with` block.

        with timeline.measured_spans(pipe) as spans:
            pipe.step(images, targets)
        timeline.write_chrome_trace("trace.json", spans)

    On a GPU these are the times at which the host queues the work, not those at which it runs.
    """
    spans: dict[Action, tuple[float, float]] = {}
    before = pipe.observer
    pipe.observer = lambda action, start: spans.update({action: (start, time.perf_counter())})
    try:
        yield spans
    finally:
        pipe.observer = before


def write_chrome_trace(path: str | Path, spans: Mapping[Action, tuple[float, float]]) -> None:
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
