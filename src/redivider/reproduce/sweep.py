"""Overlap against reverse, from one sample to as many as fit: where it wins, and by how much.

On a GPU steps are captured, so that the host does not matter; both ways take turns.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from redivider.auto import is_short_of_memory
from redivider.reproduce.steps import Rows, Step, let_go, take_workspaces

NAMES = (
    *(f"rev_vit_{size}" for size in ("small", "base", "large", "huge", "giant")),
    *(f"rev_swin_{size}" for size in ("tiny", "small", "base", "large", "huge", "giant")),
    "rev_mvit_base",
    *(f"rev_roberta_{size}" for size in ("base", "large")),
)
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
WAYS = ("reverse", "overlap")
ROUNDS = 5
LEAST = 0.1  # seconds of a round, so that the host's part is small


def measure(model: str, device: torch.device, known: Rows) -> Iterator[dict[str, Any]]:
    """A row for each batch that is not known, up to the first at which both ways do not fit."""
    for batch in BATCHES:
        name = f"{model}/{batch}"
        row = known.get(name)
        if row is None:
            row = {"run": name, "model": model, "batch": batch}
            try:
                row |= _time(model, batch, device)
            except RuntimeError as error:
                if not is_short_of_memory(error):
                    raise
                row["failed"] = "it does not fit"
            let_go()
            yield row
        if "failed" in row:
            return


def _time(model: str, batch: int, device: torch.device, **options: Any) -> dict[str, Any]:
    take_workspaces(device)
    step = Step(model, batch, device, **options)
    reserved, steps = {}, {}
    for way in WAYS:
        let_go()
        before = _reserved(device)
        steps[way] = _ready(step, way)
        let_go()
        reserved[way] = _reserved(device) - before
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            took[way].append(_milliseconds(steps[way], device))
    ms = {way: median(each) for way, each in took.items()}
    return {
        **{f"ms, {way}": round(ms[way], 4) for way in WAYS},
        "faster": round(ms["reverse"] / ms["overlap"], 4),
        **{f"MiB, {way}": reserved[way] >> 20 for way in WAYS},
    }


def _ready(step: Step, way: str) -> Callable[[], Tensor]:
    """The step in one way, captured where that can be."""
    if step.device.type == "cuda":
        return step.captured(way)
    step.run(way)
    return lambda: step.run(way)


def _milliseconds(step: Callable[[], Tensor], device: torch.device) -> float:
    step()  # what changed hands is put in its place
    once = _seconds(step, device, 1)
    num = min(round(LEAST / once), 200)
    return 1000 * (_seconds(step, device, num) / num if num > 1 else once)


def _seconds(step: Callable[[], Tensor], device: torch.device, num: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(num):
        step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
