"""The largest batch, and the largest depth, of which a training step fits into memory.

A step is forward and backward with weights and gradients in float32, without an optimizer, whose
state would make depths smaller.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from redivider.reproduce.steps import Step, is_short_of_memory, let_go

MODEL = "rev_vit_large"
WAYS = ("store", "checkpoint", "reverse")
BATCH = 64  # at which depths are tried
PRECISION = 0.03


NAMES = tuple(f"{what}-{way}" for what in ("batch", "depth") for way in WAYS)


def measure(
    device: torch.device, only: Sequence[str] = (), known: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """A row for each way of the backward, and each of batch and depth.

    Args:
        device: Where.
        only: Some of `NAMES`; all unless given.
        known: Those that are not to be measured again.
    """
    for what, first in (("batch", 64), ("depth", 24)):
        for way in WAYS:
            name = f"{what}-{way}"
            if name in known or name not in (only or NAMES):
                continue

            def fits(size: int, what: str = what, way: str = way) -> bool:
                batch, options = (size, {}) if what == "batch" else (BATCH, {"depth": size})
                return step_fits(way, batch, device, **options)

            yield {"run": name, "model": MODEL, "way": way, what: largest(fits, first)}


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
