"""Strategies of a backward: what every unit keeps for it, and what is computed again.

    backward               a coupling    a junction    work (forward and backward of a unit: 3)
    "store"                graph         graph         3
    "checkpoint"           input         input         4
    "reverse"              nothing       graph         4, junctions 3
    "reverse-checkpoint"   nothing       input         4
    "overlap"              nothing       graph         4, one of them beside the others
    "checkpoint-overlap"   input         input         4, one of them beside the others
    "auto"                 nothing       graph         "reverse" or "overlap", whichever is faster

Gomez et al. 2017 (RevNet) for reversal, Chen et al. 2016 for checkpoints; for the overlap see
overlap.py, for the choice auto.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from redivider.tree import tensors_of

if TYPE_CHECKING:
    from redivider.backward.overlap import Overlap

Keep: TypeAlias = Literal["graph", "input", "nothing"]


@dataclass(frozen=True)
class Strategy:
    """Row of the table: what couplings and junctions keep between forward and backward."""

    coupling: Keep
    junction: Keep
    overlaps: bool = False

    @property
    def reverses(self) -> bool:
        """Whether inputs of couplings are rebuilt from their outputs."""
        return self.coupling == "nothing"

    def make_overlap(self, x: Any) -> "Overlap | None":
        """Return what prepares units before their turn, for a chain that runs on x on a GPU."""
        tensors = tensors_of(x) if self.overlaps else []
        if not tensors or not tensors[0].is_cuda:
            return None
        from redivider.backward.overlap import Overlap

        return Overlap(tensors[0].device)


STORE = Strategy("graph", "graph")
STRATEGIES = {
    "store": STORE,
    "checkpoint": Strategy("input", "input"),
    "reverse": Strategy("nothing", "graph"),
    "reverse-checkpoint": Strategy("nothing", "input"),
    "overlap": Strategy("nothing", "graph", overlaps=True),
    "checkpoint-overlap": Strategy("input", "input", overlaps=True),
    "auto": Strategy("nothing", "graph"),
}


def resolve_strategy(name: str) -> Strategy:
    """Look a strategy up."""
    if name not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"backward must be one of {known}, got {name!r}")
    return STRATEGIES[name]
