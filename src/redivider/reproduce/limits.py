"""The largest batch, and the largest depth, of which a training step fits into memory.

A step is forward and backward with weights and gradients in float32, without an optimizer, whose
state would make depths smaller.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from redivider.auto import is_short_of_memory
from redivider.reproduce.steps import Rows, Step, let_go

MODEL = "rev_vit_large"
WAYS = ("store", "checkpoint", "reverse")
BATCH = 64  # at which depths are tried
PRECISION = 0.03
NAMES = tuple(f"{what}-{way}" for what in ("batch", "depth") for way in WAYS)


def measure(name: str, device: torch.device, known: Rows) -> Iterator[dict[str, Any]]:
    """The row of one of `NAMES`, a batch or a depth by one way of the backward, if not known."""
    what, _, way = name.partition("-")

    def fits(size: int) -> bool:
        batch, options = (size, {}) if what == "batch" else (BATCH, {"depth": size})
        return step_fits(way, batch, device, **options)

    if name not in known:
        found = largest(fits, first=64 if what == "batch" else 24)
        yield {"run": name, "model": MODEL, "way": way, what: found}


def largest(fits: Callable[[int], bool], first: int, most: int = 2**16) -> int:
    """The largest size that fits, but for 3 %: doubled until one does not, then halved between."""
    good, bad = 0, first
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, PRECISION * good):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def step_fits(way: str, batch: int, device: torch.device, **options: Any) -> bool:
    """Whether a step with weights in float32 fits, eagerly."""
    try:
        Step(MODEL, batch, device, dtype=torch.float32, **options).run(way)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return True
    except RuntimeError as error:
        if not is_short_of_memory(error):
            raise
        return False
    finally:
        let_go()
