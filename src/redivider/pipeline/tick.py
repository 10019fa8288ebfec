"""Result of one tick of a pipeline."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Tick:
    """Micro-batch whose loss was computed in a tick, if any; None while the pipeline fills."""

    microbatch: int | None = None
    loss: Tensor | None = None
    aux: Any = None
    reason: str | None = None
    """Why there is no loss although the pipeline is full: it is in another process."""
