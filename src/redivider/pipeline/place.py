"""Units at their places: which stage each is in, and what it follows."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

from torch import nn

from redivider.arithmetic import Arithmetic
from redivider.chain import name_unit
from redivider.coupling import Coupling
from redivider.pipeline.cut import balance_of, count_costs, cut_evenly
from redivider.pipeline.memory import Method
from redivider.pipeline.stage import Stage
from redivider.pipeline.unit import Unit


def resolve_cut(
    units: dict[str, nn.Module], stages: int | Sequence[int] | str, example: Any
) -> tuple[list[int], float]:
    """The sizes of the stages, and their balance."""
    by = "units" if example is None else "work"
    costs = count_costs(list(units.values()), by, example)
    if isinstance(stages, str):
        if stages != "auto":
            raise ValueError(f'stages must be a number, a list of sizes or "auto", got {stages!r}')
        sizes = [1] * len(units)
    elif isinstance(stages, int):
        sizes = cut_evenly(costs, stages)
    else:
        sizes = list(stages)
        if any(size < 1 for size in sizes) or sum(sizes) != len(units):
            raise ValueError(
                f"the sizes of the stages, {sizes}, must be at least 1 and add up to the number of "
                f"units, {len(units)}; rd.balance(model, {len(sizes)}) gives such a list"
            )
    return sizes, balance_of(costs, sizes)


def place_units(
    units: dict[str, nn.Module],
    cut: Sequence[int],
    method: Method,
    arithmetic: Arithmetic,
    seed: int,
) -> dict[str, Unit]:
    """Give every unit what it must know of its place."""
    modules = list(units.values())
    last = len(modules) - cut[-1]  # the first unit of the last stage
    return {
        name: Unit(
            module,
            index,
            name_unit(index, module, name),
            method=method,
            arithmetic=arithmetic,
            seed=seed,
            follows=_kind(modules[index - 1]) if index else "nothing",
            at_the_end=index >= last,
        )
        for index, (name, module) in enumerate(units.items())
    }


def group_units(units: dict[str, Unit], cut: Sequence[int]) -> list[Stage]:
    """Make the stages of a cut."""
    named = list(units.items())
    ends = accumulate(cut)
    return [
        Stage(j, dict(named[end - size : end]))
        for j, (size, end) in enumerate(zip(cut, ends, strict=True))
    ]


def verify_unshared(stages: Sequence[Stage]) -> None:
    """Refuse a parameter that two stages would train: they do so at different times."""
    owners: dict[int, tuple[int, str]] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            j, other = owners.setdefault(id(parameter), (stage.index, name))
            if j != stage.index:
                raise ValueError(
                    f"the parameter {name!r} of stage {stage.index} is also {other!r} of stage "
                    f"{j}: stages update at different times, so they cannot share it; untie it, or "
                    "put both units into one stage"
                )


def _kind(module: nn.Module) -> Literal["coupling", "junction"]:
    return "coupling" if isinstance(module, Coupling) else "junction"
