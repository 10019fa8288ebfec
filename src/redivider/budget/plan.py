"""Plans: what every unit of a network keeps, so that a step is fastest within a budget."""

import json
import numbers
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from redivider._torch_private import original_module
from redivider.backward.strategy import resolve_strategy
from redivider.budget.blocks import measure_blocks
from redivider.budget.measure import differentiate, measure
from redivider.budget.meter import counting, gpu_of
from redivider.budget.problem import Problem, find_least, trace
from redivider.budget.solve import solve
from redivider.budget.trial import wanted_of
from redivider.budget.unit import OF_BLOCKS
from redivider.chain import Chain, name_unit, verify_keywords
from redivider.checks.memory import format_bytes
from redivider.checks.restore import restored
from redivider.checks.size import parse_bytes
from redivider.convert.reversible import UNPLANNED, blocks_of, set_strategies, strategies_of
from redivider.errors import require
from redivider.files import atomic_write
from redivider.tree import as_leaf, map_tensors, tensors_of

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
        inner = _unwrapped(model)
        _verify_kind(inner, "apply")
        if inner is not self._model:
            (self._verify_chain if isinstance(inner, Chain) else self._verify_blocks)(inner)
        _set_backward(inner, _backward(inner, self.units))
        return model

    def _verify_chain(self, chain: Chain) -> None:
        """Refuse a chain whose units are not those of the plan."""
        names = _unit_names(chain)
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
    _verify(model, x, side)
    x, side = map_tensors(as_leaf, (x, side))
    device = gpu_of((x, side))
    budget = _free(model, device) if memory is None else parse_bytes(memory)
    margin = 0.0 if device is None else MARGIN
    loss = _default_loss if loss is None else loss
    if not callable(loss):
        raise TypeError(
            "loss takes the output of the model, such as loss=lambda y: F.cross_entropy(y, "
            f"targets), got {type(loss).__name__}"
        )
    if isinstance(model, Chain):
        names = _unit_names(model)
        problem = measure(model, x, side, loss, is_captured=capture)
    else:
        names, problem = measure_blocks(model, x, side, loss, is_captured=capture)
        names.append("the head and the loss")
    spare = int(margin * budget)
    limit, note = budget - spare, ""
    # The second plan is for less than the first one, and the third takes as little as possible.
    for _ in range(3):
        choices = cheapest(problem, limit) or smallest(problem)
        units = list(_planned(problem, choices, names))
        measured = measure_step(model, _backward(model, units), x, loss, **side)
        if measured <= budget - spare // 3:  # steps differ by less than that
            cost_unit = "FLOPs" if device is None else "seconds"
            return Plan(units, budget, measured, cost_unit, note, model)
        predicted = max(unit.peak for unit in units)
        if choices == smallest(problem):
            break
        limit = 0 if note else budget - spare - (measured - predicted)
        too_much = format_bytes(measured - (budget - spare // 3))
        note = f"made again, as a first plan took {too_much} too much"
    largest = next(unit.name for unit in units if unit.peak == predicted)
    raise ValueError(
        f"no plan fits into {budget:,} bytes: the smallest budget is "
        f"{measured + int(margin * measured):,} bytes, which {largest} needs; use a smaller batch"
    )


def cheapest(problem: Problem, memory: int) -> list[int] | None:
    """Return the index of the cheapest option of every unit, or None if nothing fits.

    Gradients are exact if that takes no longer.
    """
    choices, exact = solve(problem, memory), problem.without("compress")
    if choices is None or exact.units == problem.units:
        return choices
    others = solve(exact, memory)
    if others is None or cost_of(exact, others) > cost_of(problem, choices):
        return choices
    pairs = zip(problem.units, exact.units, others, strict=True)
    return [own.index(options[choice]) for own, options, choice in pairs]


def smallest(problem: Problem) -> list[int]:
    """Return the index of the option of every unit, in a plan for the smallest budget."""
    # By bytes, which are the same in every measurement, while times differ.
    choices = solve(problem.by_bytes(), find_least(problem))
    assert choices is not None
    return choices


def cost_of(problem: Problem, choices: Sequence[int]) -> float:
    """Return the work or time that choices add to that of `store`."""
    return sum(own[choice].cost for own, choice in zip(problem.units, choices, strict=True))


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
    inputs = (x,) if isinstance(model, Chain) or x is not None else ()
    module = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    torch.clear_autocast_cache()
    with (
        _training_by(model, backward),
        restored(module, checks_drift=True),  # a step that does takes most
        torch.enable_grad(),
        counting(gpu_of((x, side)), weights) as meter,
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
    unplanned = dict.fromkeys(blocks_of(model), UNPLANNED)  # frozen ones, which run plainly
    return unplanned | {unit.name: unit.choice for unit in units[:-1]}


def _planned(
    problem: Problem, choices: Sequence[int], names: Sequence[str]
) -> Iterator[PlannedUnit]:
    before = 0
    options = [own[choice] for own, choice in zip(problem.units, choices, strict=True)]
    for name, option, (held, peak) in zip(names, options, trace(problem, choices), strict=True):
        yield PlannedUnit(name, option.choice, held - before, option.cost, peak)
        before = held


def _wrappers(*, sharded: bool) -> tuple[Any, ...]:
    """Return the classes of DDP and FSDP; modules that are sharded in place are no wrappers."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return (DistributedDataParallel,)
    in_place = [fsdp.FSDPModule] if sharded else []
    return (DistributedDataParallel, fsdp.FullyShardedDataParallel, *in_place)


def _unwrapped(model: Any) -> Any:
    """Return the model that DDP, FSDP or torch.compile wraps."""
    while True:
        if isinstance(model, _wrappers(sharded=False)):
            model = model.module
        elif isinstance(model, nn.Module) and original_module(model) is not None:
            model = original_module(model)
        else:
            return model


def _verify_kind(model: Any, function: str) -> None:
    """Refuse what is neither a chain nor a reversible network."""
    if not isinstance(model, Chain) and not (isinstance(model, nn.Module) and blocks_of(model)):
        raise TypeError(
            f"{function} takes a Chain or a network of rd.make_reversible, "
            f"got {type(model).__name__}"
        )


def _verify(model: Any, x: Any, side: dict[str, Any]) -> None:
    """Refuse a model that cannot be planned, and inputs that it does not take."""
    wrappers = _wrappers(sharded=True)
    if isinstance(model, nn.Module) and any(isinstance(own, wrappers) for own in model.modules()):
        raise ValueError(
            "plan the model before DDP or FSDP wraps it: plan = rd.plan(model, x); then "
            "plan.apply() works before and after"
        )
    if _unwrapped(model) is not model:
        raise ValueError("plan the model itself, not torch.compile(model); model.compile() works")
    _verify_kind(model, "plan")
    if isinstance(model, Chain):
        if x is None:
            raise TypeError("the input of a chain has no name: rd.plan(model, x, memory=...)")
        verify_keywords(side, model.takes)
    tensors = [*tensors_of((x, side)), *model.parameters()]
    if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors):
        raise ValueError("a plan needs gradients, which tensors of torch.inference_mode() lack")


def _unit_names(model: Chain) -> list[str]:
    keys = enumerate(zip(model._modules, model, strict=True))
    return [*(name_unit(index, unit, key) for index, (key, unit) in keys), "the loss"]


def _default_loss(y: Any) -> list[Tensor]:
    """Return the loss that is part of an output, or the sums of its tensors."""
    loss = getattr(y, "loss", None)
    return [loss] if isinstance(loss, Tensor) else [tensor.sum() for tensor in tensors_of(y)]


def _free(model: nn.Module, device: torch.device | None) -> int:
    """Return the bytes that are free, without those that gradients will take."""
    grads = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached - grads
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if match is None:
        raise ValueError('on this system, say how much memory there is: memory="8GiB"')
    return int(match[1]) * 1024 - grads
