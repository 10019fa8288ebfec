"""Errors by unit or parameter, as the checks report them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from redivider.chain import Chain


@dataclass(frozen=True)
class Errors:
    """Relative errors by unit or parameter."""

    title: str
    errors: dict[str, float]
    notes: dict[str, str] = field(default_factory=dict)
    """Defects that are not errors of numbers, by unit."""

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors.values(), default=0.0)

    @property
    def each(self) -> dict[str, float]:
        """Former name of `errors`."""
        return self.errors

    def __str__(self) -> str:
        """Format the five largest errors as a table, and all notes."""
        largest = sorted(self.errors.items(), key=lambda item: -item[1])[:5]
        rows = [f"  {error:8.1e}  {name}" for name, error in largest]
        more = [f"  and {len(self.errors) - 5} more"] if len(self.errors) > 5 else []
        units: dict[str, list[str]] = {}
        for name, note in self.notes.items():
            units.setdefault(note, []).append(name)
        notes = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {note}"
            for note, names in units.items()
        ]
        return "\n".join([f"{self.title}: at most {self.worst:.1e}", *rows, *more, *notes])


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table, the first column flush left, all others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def verify_chain(chain: Any) -> None:
    """Refuse anything but a chain."""
    if not isinstance(chain, Chain):
        raise TypeError(f"the checkers take a Chain, got {type(chain).__name__}")


def widen(x: Tensor) -> Tensor:
    """Return a tensor in double precision, real or complex."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
