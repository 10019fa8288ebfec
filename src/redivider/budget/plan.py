"""Plans: what every unit of a network keeps, so that a step is fastest within a budget."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from redivider.budget.blocks import measure_blocks
from redivider.budget.measure import differentiate, measure, wanted_of
from redivider.budget.meter import counting
from redivider.budget.solve import Problem, find_least, solve, trace
from redivider.chain import Chain, name_unit
from redivider.checks.memory import format_bytes
from redivider.checks.restore import restored
from redivider.checks.size import parse_bytes
from redivider.convert.reversible import blocks_of, set_strategies, strategies_of
from redivider.errors import require
from redivider.tree import tensors_of

MARGIN = 0.03  # of the memory of a GPU, for its allocator


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
            raise ValueError("a plan that was loaded has no model: plan.apply(model)")
        _set_backward(model, _backward(model, self.units))
        return model

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        names = ("memory", "measured", "cost_unit", "note")
        values = {name: getattr(self, name) for name in names}
        values["units"] = [asdict(unit) for unit in self.units]
        Path(path).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a file of `save`."""
        try:
            values = json.loads(Path(path).read_text())
            units = [PlannedUnit(**unit) for unit in values.pop("units")]
            return cls(units, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a plan, as plan.save writes it: {error}") from None

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


def plan(
    model: nn.Module,
    x: Any = None,
    /,
    *,
    memory: int | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    capture: bool = False,
    **side: Any,
) -> Plan:
    """Choose for every unit what it keeps, so that a step is fastest within a number of bytes.

        plan = rd.plan(model, x, memory="6GiB", loss=lambda y: F.cross_entropy(y, targets))
        print(plan)
        plan.apply()

    Every kind of unit is measured once, and the plan is checked on one real step. The model stays
    as it is until `plan.apply()`. Call this under the autocast of the training, and before DDP or
    FSDP wraps the model.

    Args:
        model: A chain, or a network of `rd.make_reversible`, whose blocks are the units. It is in
            training mode, on the device where it trains, compiled or not.
        x: Its input; a network that takes keywords alone has none.
        memory: Bytes, also as "6GiB" or "500 MB", that forward and backward may add to the weights,
            their gradients and the state of the optimizer. By default what is free.
        loss: A function from the output to a loss; by default the loss that is part of the output,
            as that of transformers, else the sum of the output. Its memory counts as well. What the
            caller keeps of the output comes on top.
        capture: Whether steps will be captured (`rd.capture`). Then "offload" is no choice, and on
            a GPU the time of the host does not count.
        **side: Keywords of the model.

    Raises:
        ValueError: If no plan fits; it says how much is needed, and by which unit.
    """
    _verify(model)
    is_cuda = any(tensor.is_cuda for tensor in tensors_of((x, side)))
    budget = _free(model, is_cuda) if memory is None else parse_bytes(memory)
    loss = _default_loss if loss is None else loss
    if isinstance(model, Chain):
        names = _unit_names(model)
        problem = measure(model, x, side, loss, is_captured=capture)
    else:
        names, problem = measure_blocks(model, x, side, loss, is_captured=capture)
        names.append("the head and the loss")
    limit, note = budget - int(MARGIN * budget) * is_cuda, ""
    while True:
        choices = solve(problem, limit) if limit > 0 else None
        fits = choices is not None
        choices = choices or solve(problem, find_least(problem)) or []
        units = list(_planned(problem, choices, names))
        measured = measure_step(model, _backward(model, units), x, loss, **side)
        if measured <= budget:
            return Plan(units, budget, measured, "seconds" if is_cuda else "FLOPs", note, model)
        predicted = max(unit.peak for unit in units)
        if not fits:
            largest = next(unit.name for unit in units if unit.peak == predicted)
            needed = measured + int(MARGIN * measured) * is_cuda
            raise ValueError(
                f"no plan fits into {budget:,} bytes: the smallest budget is {needed:,} bytes, "
                f"which {largest} needs; use a smaller batch"
            )
        # Made once more for less; if that is not enough, for as little as possible.
        limit = 0 if note else budget - (measured - predicted)
        note = f"made again, as a first plan took {format_bytes(measured - budget)} too much"


def measure_step(
    model: nn.Module,
    backward: str | Sequence[str] | Mapping[str, str],
    x: Any,
    loss: Callable[[Any], Any],
    **side: Any,
) -> int:
    """Return the peak of a forward and backward, without the gradients of weights, in bytes.

    Args:
        model: The chain or network, which stays as it is.
        backward: Strategy to run it by, or one for every unit of a chain, or by name of a block.
        x: Its input; None if it takes keywords alone.
        loss: A function from its output to a loss.
        **side: Its keywords.
    """
    is_cuda = any(tensor.is_cuda for tensor in tensors_of((x, side)))
    inputs = (x,) if isinstance(model, Chain) or x is not None else ()
    module = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    torch.clear_autocast_cache()
    with (
        _training_by(model, backward),
        restored(module, checks_drift=True),  # a step that does takes most
        torch.enable_grad(),
        counting(is_cuda, weights) as meter,
    ):
        wanted = [*weights, *wanted_of((x, side))]
        grads = differentiate(loss(model(*inputs, **side)), wanted)
        return meter.peak_without(grads[: len(weights)])


@contextmanager
def _training_by(model: Any, backward: Any) -> Iterator[None]:
    """Let a chain or a network train by some strategies, inside."""
    before = model.backward if isinstance(model, Chain) else strategies_of(model)
    try:
        _set_backward(model, backward)
        yield
    finally:
        _set_backward(model, before)


def _set_backward(model: Any, backward: Any) -> None:
    if isinstance(model, Chain):
        model.backward = backward
    else:
        set_strategies(model, backward)


def _backward(model: nn.Module, units: Sequence[PlannedUnit]) -> Any:
    """Return the strategies of planned units, as a model takes them."""
    if isinstance(model, Chain):
        return tuple(unit.choice for unit in units[:-1])
    return {unit.name: unit.choice for unit in units[:-1]}


def _planned(
    problem: Problem, choices: Sequence[int], names: Sequence[str]
) -> Iterator[PlannedUnit]:
    before = 0
    options = [own[choice] for own, choice in zip(problem.units, choices, strict=True)]
    for name, option, (held, peak) in zip(names, options, trace(problem, choices), strict=True):
        yield PlannedUnit(name, option.choice, held - before, option.cost, peak)
        before = held


def _verify(model: Any) -> None:
    """Refuse a model that cannot be planned."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = [] if fsdp is None else [fsdp.FSDPModule, fsdp.FullyShardedDataParallel]
    wrappers = (DistributedDataParallel, *sharded)
    if isinstance(model, nn.Module) and any(isinstance(own, wrappers) for own in model.modules()):
        raise ValueError(
            "plan the model before DDP or FSDP wraps it: plan = rd.plan(model, x); then "
            "plan.apply() works before and after"
        )
    if not isinstance(model, Chain) and not (isinstance(model, nn.Module) and blocks_of(model)):
        raise TypeError(
            f"plan takes a Chain or a network of rd.make_reversible, got {type(model).__name__}"
        )


def _unit_names(model: Chain) -> list[str]:
    keys = enumerate(zip(model._modules, model, strict=True))
    return [*(name_unit(index, unit, key) for index, (key, unit) in keys), "the loss"]


def _default_loss(y: Any) -> list[Tensor]:
    """Return the loss that is part of an output, or the sums of its tensors."""
    loss = getattr(y, "loss", None)
    return [loss] if isinstance(loss, Tensor) else [tensor.sum() for tensor in tensors_of(y)]


def _free(model: nn.Module, is_cuda: bool) -> int:
    """Return the bytes that are free, without those that gradients will take."""
    grads = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    if is_cuda:
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - grads
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if match is None:
        raise ValueError('on this system, say how much memory there is: memory="8GiB"')
    return int(match[1]) * 1024 - grads
