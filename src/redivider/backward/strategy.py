"""Strategies of a backward: what every unit keeps for it, and what is computed again.

    backward               a coupling    a junction    work (forward and backward of a unit: 3)
    "store"                graph         graph         3
    "checkpoint"           input         input         4
    "offload"              input, in host memory       4, and copies beside them
    "compress"             nothing       a few bits    4
    "reverse"              nothing       graph         4, junctions 3
    "reverse-checkpoint"   nothing       input         4
    "overlap"              nothing       graph         4, one of them beside the others
    "checkpoint-overlap"   input         input         4, one of them beside the others
    "save"                 nothing       input         4, less the operations that are saved
    "offload-save"         input and what is saved,    the same, and copies beside them
                           in host memory
    "trim"                 input, results of products  3, and pointwise work
    "auto"                 nothing       graph         "reverse" or "overlap", whichever is faster

With "save" units also keep fused attention and what `rd.save` marks. A compiled f keeps them in a
graph, with its input, and is not reversed. "trim" is for compiled f alone.

Gomez et al. 2017 (RevNet) for reversal, Chen et al. 2016 for checkpoints; for the overlap see
overlap.py, for the choice auto.py, for few bits tape.py, for host memory offload.py, for saved
operations saving.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from redivider.coupling import Coupling
from redivider.errors import not_one_of
from redivider.tree import tensors_of

if TYPE_CHECKING:
    from redivider.backward.node import Keeper
    from redivider.backward.overlap import Overlap

Keep: TypeAlias = Literal["graph", "input", "nothing"]


class Keeping(NamedTuple):
    """State that one unit of a pass keeps, and its helpers, which units of a strategy share."""

    keep: Keep
    ahead: "Overlap | None" = None
    """Scheduler that prepares units before their turn, if there is one."""
    keeper: "Keeper | None" = None
    """Keeper of inputs elsewhere than in the graph, if there is one."""
    saving: Callable[[Any], Any] | None = None
    """Constructor of what keeps outputs of operations inside of a call, if there is one."""
    run: Callable[..., Any] | None = None
    """Function that runs the module with its graph, if that is not the module itself."""


@dataclass(frozen=True)
class Strategy:
    """Row of the table: what couplings and junctions keep between forward and backward."""

    coupling: Keep
    junction: Keep
    overlaps: bool = False
    offloads: bool = False
    compresses: bool = False
    saves: bool = False
    trims: bool = False

    @property
    def reverses(self) -> bool:
        """Whether inputs of couplings are rebuilt from their outputs."""
        return self.coupling == "nothing"

    def make_overlap(self, x: Any) -> "Overlap | None":
        """Return what prepares units before their turn, for a chain that runs on x on a GPU."""
        device = _gpu_of(x) if self.overlaps else None
        if device is None:
            return None
        from redivider.backward.overlap import Overlap

        return Overlap(device)

    def make_keeper(self, x: Any) -> "Keeper | None":
        """Return what keeps inputs of units elsewhere than in the graph, for a chain's run on x."""
        if self.compresses:
            from redivider.backward.tape import Tapes

            return Tapes()
        device = _gpu_of(x) if self.offloads else None
        if device is None:
            return None
        from redivider.backward.offload import Offload

        return Offload(device)


def _gpu_of(x: Any) -> torch.device | None:
    """Return the GPU of the first tensor, if it is on one."""
    tensors = tensors_of(x)
    return tensors[0].device if tensors and tensors[0].is_cuda else None


STORE = Strategy("graph", "graph")
STRATEGIES = {
    "store": STORE,
    "checkpoint": Strategy("input", "input"),
    "offload": Strategy("input", "input", offloads=True),
    "compress": Strategy("nothing", "input", compresses=True),
    "reverse": Strategy("nothing", "graph"),
    "reverse-checkpoint": Strategy("nothing", "input"),
    "overlap": Strategy("nothing", "graph", overlaps=True),
    "checkpoint-overlap": Strategy("input", "input", overlaps=True),
    "save": Strategy("nothing", "input", saves=True),
    "offload-save": Strategy("input", "input", offloads=True, saves=True),
    "trim": Strategy("graph", "graph", trims=True),
    "auto": Strategy("nothing", "graph"),
}


def resolve_strategy(name: str) -> Strategy:
    """Look a strategy up."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(not_one_of("backward", name, STRATEGIES))
    return STRATEGIES[name]


def resolve_strategies(backward: str | Sequence[str], num_units: int) -> list[Strategy]:
    """Return the strategy of every unit, from one name for all of them or a name for each."""
    if isinstance(backward, str):
        return [resolve_strategy(backward)] * num_units
    if not isinstance(backward, Sequence):
        raise TypeError(f"backward must be a name, or a list of names, got {backward!r}")
    if len(backward) != num_units:
        raise ValueError(
            f"backward names {len(backward)} strategies, and the chain has {num_units} units"
        )
    if "auto" in backward:
        raise ValueError('"auto" is for a whole chain; name "reverse" or "overlap" for a unit')
    return [resolve_strategy(name) for name in backward]


def begin_pass(strategies: Sequence[Strategy], units: Iterable[nn.Module], x: Any) -> list[Keeping]:
    """Return what every unit keeps in a pass on x."""
    kinds = dict.fromkeys(strategies)
    overlaps = {own: own.make_overlap(x) for own in kinds}
    # Tensors of all units that wait on the host leave and return in one order.
    makers = {(own.offloads, own.compresses): own for own in kinds}
    keepers = {kind: own.make_keeper(x) for kind, own in makers.items()}
    pairs = list(zip(strategies, units, strict=True))
    keepings = [
        Keeping(
            own.coupling if isinstance(unit, Coupling) else own.junction,
            overlaps[own],
            keepers[own.offloads, own.compresses],
        )
        for own, unit in pairs
    ]
    if any(own.saves or own.trims for own in strategies):
        from redivider.backward.saving import refine

        keepings = [refine(*pair, keeping) for pair, keeping in zip(pairs, keepings, strict=True)]
    return keepings
