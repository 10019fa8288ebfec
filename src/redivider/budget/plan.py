"""Plans: what every unit of a network keeps, so that a step is fastest within a budget."""

import json
import numbers
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from redivider._torch_private import original_module
from redivider.backward.strategy import resolve_strategy
from redivider.budget.unit import OF_BLOCKS
from redivider.chain import Chain, name_unit
from redivider.checks.memory import format_bytes
from redivider.convert.reversible import UNPLANNED, blocks_of, set_strategies
from redivider.errors import require
from redivider.files import atomic_write


@dataclass(frozen=True)
class PlannedUnit:
    """Choice for one unit, and what it takes."""

    name: str
    choice: str
    held: int
    """Bytes that it adds to those held between forward and backward."""
    cost: float
    """Work or time that it adds to that of `store`."""
    peak: int
    """Largest number of bytes while it runs, with all that lower units hold."""


class Plan(Sequence[str]):
    """Strategy for every unit of a chain, or every block of a network, made by `rd.plan`.

    It is a sequence of names, which `Chain(..., backward=plan)` takes.

    Args:
        units: Choices, and what they take; the last one is the loss, with the head of a network.
        memory: Budget in bytes.
        measured: Bytes of a real step.
        cost_unit: Unit of the costs: "FLOPs" or "seconds".
        note: Remark about how the plan was made.
        model: Chain or network that `apply` changes.
    """

    def __init__(
        self,
        units: Sequence[PlannedUnit],
        memory: int,
        measured: int,
        cost_unit: str,
        note: str = "",
        model: nn.Module | None = None,
    ) -> None:
        self.units, self.memory, self.measured = tuple(units), memory, measured
        self.cost_unit, self.note = cost_unit, note
        self._model = model

    @property
    def choices(self) -> tuple[str, ...]:
        """Strategies of the units, in order."""
        return tuple(unit.choice for unit in self.units[:-1])

    @property
    def predicted(self) -> int:
        """Largest number of bytes, by the measurements of the units."""
        return max(unit.peak for unit in self.units)

    @property
    def cost(self) -> float:
        """Work or time that is added to that of `store`."""
        return sum(unit.cost for unit in self.units)

    @property
    def summary(self) -> str:
        """The numbers of units by choice, and the peak, in a line."""
        counts = ", ".join(f"{num} {name}" for name, num in Counter(self.choices).most_common())
        return f"{counts}; peak {format_bytes(self.measured)} of {format_bytes(self.memory)}"

    def __len__(self) -> int:
        return len(self.units) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.choices[index]

    def __repr__(self) -> str:
        return f"<Plan of {len(self)} units within {format_bytes(self.memory)}>"

    def __str__(self) -> str:
        """Format a table of the units, from the bottom."""
        rows = [("unit", "choice", "held", f"added {self.cost_unit}", "peak")]
        rows += [
            (
                unit.name,
                unit.choice,
                format_bytes(unit.held),
                f"{unit.cost:.3g}",
                format_bytes(unit.peak),
            )
            for unit in self.units
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        peaks = format_bytes(self.predicted), format_bytes(self.measured)
        lines.append(
            f"peak {peaks[1]} measured, {peaks[0]} predicted, {format_bytes(self.memory)} allowed; "
            f"{self.cost:.3g} {self.cost_unit} added"
        )
        return "\n".join([*lines, self.note] if self.note else lines)

    def apply(self, model: nn.Module | None = None) -> nn.Module:
        """Let a model train by this plan, in place; by default the one it was made for."""
        model = self._model if model is None else model
        if model is None:
            raise ValueError("a plan that was loaded or copied has no model: plan.apply(model)")
        inner = unwrapped(model)
        verify_kind(inner, "apply")
        if inner is not self._model:
            (self._verify_chain if isinstance(inner, Chain) else self._verify_blocks)(inner)
        set_backward(inner, backward_of(inner, self.units))
        return model

    def _verify_chain(self, chain: Chain) -> None:
        """Refuse a chain whose units are not those of the plan."""
        names = unit_names(chain)
        if len(names) != len(self.units):
            num = f"{len(self)} units, and here are {len(chain)}"
            raise ValueError(f"the plan is of another model: it has {num}; make a new one")
        for unit, name in zip(self.units, names, strict=True):
            # `fully_shard` changes the names of classes.
            if unit.name.replace("FSDP", "") != name.replace("FSDP", ""):
                raise ValueError(
                    f"the plan is of another model: it has {unit.name!r}, and here is {name!r}"
                )

    def _verify_blocks(self, model: nn.Module) -> None:
        """Refuse a network whose blocks are not those of the plan, but for frozen ones."""
        planned = {unit.name: unit.choice for unit in self.units[:-1]}
        trained = {
            name
            for name in blocks_of(model)
            if any(param.requires_grad for param in model.get_submodule(name).parameters())
        }
        for name in sorted(trained - {*planned}):
            raise ValueError(f"the plan is of another model: it has no {name!r}; make a new one")
        for name in sorted({*planned} - {*blocks_of(model)}):
            raise ValueError(f"the plan is of another model: it has {name!r}, and here is none")
        for name, choice in planned.items():
            if choice not in OF_BLOCKS:
                raise ValueError(f"{name!r} has no choice {choice!r}: {', '.join(OF_BLOCKS)}")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        names = ("memory", "measured", "cost_unit", "note")
        values = {name: getattr(self, name) for name in names}
        values["units"] = [asdict(unit) for unit in self.units]
        with atomic_write(Path(path)) as new:
            new.write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a file of `save`."""
        try:
            values = json.loads(Path(path).read_text())
            if not isinstance(values, dict) or "units" not in values:
                raise ValueError("it has no units")
            units = [PlannedUnit(**unit) for unit in values.pop("units")]
            plan = cls(units, **values)
            plan._verify()
            return plan
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a plan, as plan.save writes it: {error}") from None

    def _verify(self) -> None:
        """Raise if a value has a wrong type, or there are no units."""
        if len(self.units) < 2:
            raise ValueError("it has no units")
        kinds: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, str: str}
        named = {"memory": int, "measured": int, "cost_unit": str, "note": str}
        values: list[tuple[str, Any, Any]]
        values = [(name, getattr(self, name), kind) for name, kind in named.items()]
        for unit in self.units:
            resolve_strategy(unit.choice)
            values += [(own.name, getattr(unit, own.name), own.type) for own in fields(unit)]
        for name, value, kind in values:
            if isinstance(value, bool) or not isinstance(value, kinds[kind]):
                raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
            if name in ("memory", "measured", "cost", "peak") and not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value!r}")

    def plot(self, path: str | Path) -> None:
        """Draw what is held and the peak by unit; the ending of the path chooses the format."""
        figure = require("matplotlib.figure", "a plot").Figure((9, 4), layout="constrained")
        axis = figure.subplots()
        held = 0.0
        colours = {choice: f"C{i}" for i, choice in enumerate(dict.fromkeys(self.choices))}
        for index, unit in enumerate(self.units):
            held += unit.held
            colour = colours.get(unit.choice, "C7")
            axis.bar(index, held / 2**20, color=colour)
            axis.bar(
                index, (unit.peak - held) / 2**20, bottom=held / 2**20, color=colour, alpha=0.3
            )
        axis.axhline(self.memory / 2**20, color="black", lw=1)
        for choice, colour in colours.items():
            axis.bar(0, 0, color=colour, label=choice)
        axis.set(xlabel="unit", ylabel="MiB", title="held (strong) and peak (pale) by unit")
        axis.legend()
        figure.savefig(path)


def set_backward(model: Any, backward: Any) -> None:
    """Let a chain or a network train by strategies."""
    if isinstance(model, Chain):
        model.backward = backward
    else:
        set_strategies(model, backward)


def backward_of(model: nn.Module, units: Sequence[PlannedUnit]) -> Any:
    """Return the strategies of planned units, as a model takes them."""
    if isinstance(model, Chain):
        return tuple(unit.choice for unit in units[:-1])
    unplanned = dict.fromkeys(blocks_of(model), UNPLANNED)  # frozen ones, which run plainly
    return unplanned | {unit.name: unit.choice for unit in units[:-1]}


def wrappers(*, sharded: bool) -> tuple[Any, ...]:
    """Return the classes of DDP and FSDP; modules that are sharded in place are no wrappers."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return (DistributedDataParallel,)
    in_place = [fsdp.FSDPModule] if sharded else []
    return (DistributedDataParallel, fsdp.FullyShardedDataParallel, *in_place)


def unwrapped(model: Any) -> Any:
    """Return the model that DDP, FSDP or torch.compile wraps."""
    while True:
        if isinstance(model, wrappers(sharded=False)):
            model = model.module
        elif isinstance(model, nn.Module) and original_module(model) is not None:
            model = original_module(model)
        else:
            return model


def verify_kind(model: Any, function: str) -> None:
    """Refuse what is neither a chain nor a reversible network."""
    if not isinstance(model, Chain) and not (isinstance(model, nn.Module) and blocks_of(model)):
        raise TypeError(
            f"{function} takes a Chain or a network of rd.make_reversible, "
            f"got {type(model).__name__}"
        )


def unit_names(model: Chain) -> list[str]:
    """Return the names of the units of a chain, and of the loss."""
    keys = enumerate(zip(model._modules, model, strict=True))
    return [*(name_unit(index, unit, key) for index, (key, unit) in keys), "the loss"]
