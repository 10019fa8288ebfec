"""Time of overlap against reverse, from one sample to as many as fit.

On a GPU steps are captured, so that the host does not matter. The two take turns, so that a
change of the GPU's clock affects both.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from steps import Rows, Step, free_memory, take_workspaces
from torch import Tensor

from redivider.backward.auto import is_short_of_memory

NAMES = (
    *(f"rev_vit_{size}" for size in ("small", "base", "large", "huge", "giant")),
    *(f"rev_swin_{size}" for size in ("tiny", "small", "base", "large", "huge", "giant")),
    "rev_mvit_base",
    *(f"rev_roberta_{size}" for size in ("base", "large")),
)
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
BACKWARDS = ("reverse", "overlap")
ROUNDS = 5
MIN_SECONDS = 0.1  # of a round, so that the time to launch it is negligible


def measure(model: str, device: torch.device, known: Rows) -> Iterator[dict[str, Any]]:
    """Yield a row for each batch that is not known, up to the first that does not fit."""
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
            free_memory()
            yield row
        if "failed" in row:
            return


def _time(model: str, batch: int, device: torch.device, **options: Any) -> dict[str, Any]:
    take_workspaces(device)
    step = Step(model, batch, device, **options)
    reserved, steps = {}, {}
    for backward in BACKWARDS:
        free_memory()
        before = _reserved(device)
        steps[backward] = _prepare(step, backward)
        free_memory()
        reserved[backward] = _reserved(device) - before
    times: dict[str, list[float]] = {backward: [] for backward in BACKWARDS}
    for _ in range(ROUNDS):
        for backward in BACKWARDS:
            times[backward].append(_milliseconds(steps[backward], device))
    ms = {backward: median(times[backward]) for backward in BACKWARDS}
    return {
        **{f"ms, {backward}": round(ms[backward], 4) for backward in BACKWARDS},
        "faster": round(ms["reverse"] / ms["overlap"], 4),
        **{f"MiB, {backward}": reserved[backward] >> 20 for backward in BACKWARDS},
    }


def _prepare(step: Step, backward: str) -> Callable[[], Tensor]:
    """Return the step with this backward, captured if it is on a GPU."""
    if step.device.type == "cuda":
        return step.captured(backward)
    step.run(backward)
    return lambda: step.run(backward)


def _milliseconds(step: Callable[[], Tensor], device: torch.device) -> float:
    step()  # not timed: attaches the gradients of this graph again
    once = _seconds(step, device, 1)
    num = min(round(MIN_SECONDS / once), 200)
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
