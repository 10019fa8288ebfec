"""Errors by unit or parameter, as the checks report them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redivider.chain import Chain


@dataclass(frozen=True)
class Errors:
    """Relative errors by unit or parameter."""

    what: str
    each: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.each.values(), default=0.0)

    def __str__(self) -> str:
        """Format the five largest errors as a table."""
        largest = sorted(self.each.items(), key=lambda item: -item[1])[:5]
        rows = [f"  {error:8.1e}  {name}" for name, error in largest]
        more = [f"  and {len(self.each) - 5} more"] if len(self.each) > 5 else []
        return "\n".join([f"{self.what}: at most {self.worst:.1e}", *rows, *more])


def verify_chain(chain: Any) -> None:
    """Refuse anything but a chain."""
    if not isinstance(chain, Chain):
        raise TypeError(f"the checkers take a Chain, got {type(chain).__name__}")


def widen(x: Tensor) -> Tensor:
    """Return a tensor in double precision, real or complex."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
