"""Search for the largest batch and the largest depth whose training step fits into memory.

A step is forward and backward with weights and gradients in float32, without an optimizer, whose
state would make depths smaller.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from steps import Rows, Step, free_memory

from redivider.backward.auto import is_short_of_memory

MODEL = "rev_vit_large"
BACKWARDS = ("store", "checkpoint", "reverse")
BATCH = 64  # for the search over depths
PRECISION = 0.03  # relative
NAMES = tuple(f"{size}-{backward}" for size in ("batch", "depth") for backward in BACKWARDS)


def measure(name: str, device: torch.device, known: Rows) -> Iterator[dict[str, Any]]:
    """Yield the row of one of `NAMES`, unless it is known."""
    what, _, backward = name.partition("-")

    def fits(size: int) -> bool:
        batch, options = (size, {}) if what == "batch" else (BATCH, {"depth": size})
        return step_fits(backward, batch, device, **options)

    if name not in known:
        size = find_largest(fits, first=64 if what == "batch" else 24)
        yield {"run": name, "model": MODEL, "way": backward, what: size}


def find_largest(fits: Callable[[int], bool], first: int, limit: int = 2**16) -> int:
    """Return the largest size that fits, to 3 %: double until one does not, then bisect."""
    good, bad = 0, first
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, PRECISION * good):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def step_fits(backward: str, batch: int, device: torch.device, **options: Any) -> bool:
    """Return True if an eager step with weights in float32 fits into memory."""
    try:
        Step(MODEL, batch, device, dtype=torch.float32, **options).run(backward)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return True
    except RuntimeError as error:
        if not is_short_of_memory(error):
            raise
        return False
    finally:
        free_memory()
