"""Placement of units: which stage a unit is in, and what it needs to know of its neighbours."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any, Literal

from torch import nn

from redivider._torch_private import has_call_hooks, has_grad_hooks
from redivider.arithmetic import Arithmetic
from redivider.chain import name_unit
from redivider.coupling import Coupling
from redivider.errors import UnitError
from redivider.pipeline.methods import Method
from redivider.pipeline.partition import count_costs, cut_evenly, loads_of
from redivider.pipeline.stages.coupling_unit import CouplingUnit
from redivider.pipeline.stages.junction_unit import JunctionUnit
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.stages.unit import Place, Unit


def resolve_cut(
    units: dict[str, nn.Module], stages: int | Sequence[int] | str, example: Any
) -> tuple[list[int], list[float]]:
    """Return the sizes of the stages, and their costs.

    Args:
        units: Units of the model, by name.
        stages: Number of stages, a list of sizes, or "auto" for one unit per stage.
        example: Input on which the work of the units is counted; None to count units.
    """
    by = "units" if example is None else "work"
    costs = count_costs(list(units.values()), by, example)
    if isinstance(stages, str):
        if stages != "auto":
            raise ValueError(f'stages must be a number, a list of sizes or "auto", got {stages!r}')
        sizes = [1] * len(units)
    elif isinstance(stages, Integral):
        sizes = cut_evenly(costs, int(stages))
    elif not isinstance(stages, Iterable):
        raise TypeError(f'stages must be a whole number, a list of sizes or "auto", got {stages!r}')
    else:
        sizes = [int(size) for size in stages]
        if any(size < 1 for size in sizes) or sum(sizes) != len(units):
            raise ValueError(
                f"the sizes of the stages, {sizes}, must be at least 1 and add up to the number of "
                f"units, {len(units)}; rd.balance(model, {len(sizes)}) gives such a list"
            )
    return sizes, loads_of(costs, sizes)


def place_units(
    units: dict[str, nn.Module],
    cut: Sequence[int],
    method: Method,
    arithmetic: Arithmetic,
    seed: int,
    own: range,
) -> dict[str, Unit]:
    """Build the units of this process's stages, with their places in the pipeline.

    Args:
        units: All units of the model, by name.
        cut: Sizes of all stages.
        method: Training method.
        arithmetic: Arithmetic of the streams.
        seed: Seed of the random numbers.
        own: Stages of this process.
    """
    modules = list(units.values())
    first_of_last_stage = len(modules) - cut[-1]
    own_units = units_of_stages(cut, own)
    for index, (name, module) in enumerate(units.items()):
        if index in own_units:
            verify_hooks(name_unit(index, module, name), module)
    placed: dict[str, Unit] = {}
    for index, (name, module) in enumerate(units.items()):
        if index not in own_units:
            continue
        place = Place(
            index,
            name_unit(index, module, name),
            method,
            seed,
            follows=_kind(modules[index - 1]) if index else "nothing",
            in_last_stage=index >= first_of_last_stage,
        )
        if isinstance(module, Coupling):
            placed[name] = CouplingUnit(module, place, arithmetic)
        else:
            placed[name] = JunctionUnit(module, place, arithmetic)
    return placed


def units_of_stages(cut: Sequence[int], stages: range) -> range:
    """Return the indices of the units of consecutive stages."""
    return range(sum(cut[: stages.start]), sum(cut[: stages.stop]))


def group_units(units: dict[str, Unit], cut: Sequence[int], own: range) -> list[Stage]:
    """Build this process's stages from its units."""
    named = list(units.items())
    sizes = cut[own.start : own.stop]
    return [
        Stage(j, dict(named[end - size : end]))
        for j, size, end in zip(own, sizes, accumulate(sizes), strict=True)
    ]


def verify_hooks(name: str, module: nn.Module) -> None:
    """Refuse hooks that a pipeline would not call.

    A pipeline sums gradients and couples streams itself, so neither the hooks of a parameter nor
    those of a coupling would run.
    """
    if any(has_grad_hooks(parameter) for parameter in module.parameters()):
        raise UnitError(
            f"{name}: a parameter has a hook for its gradient, which a pipeline would not call; a "
            "hook of the stage's optimizer (register_step_pre_hook) sees all gradients"
        )
    if isinstance(module, Coupling):
        if has_call_hooks(module):
            raise UnitError(f"{name}: has hooks, which a pipeline would not call; give them to f")
        if type(module).forward is not Coupling.forward:
            raise UnitError(f"{name}: has a forward of its own, which a pipeline would not call")


def verify_unshared(
    units: dict[str, nn.Module], cut: Sequence[int], loss: Callable[..., Any]
) -> None:
    """Refuse a parameter that two stages share, because they update at different times."""
    named = list(units.items())
    if isinstance(loss, nn.Module):
        named.append(("loss", loss))
    stages = [j for j, size in enumerate(cut) for _ in range(size)] + [len(cut) - 1]
    owners: dict[int, tuple[int, str]] = {}
    for j, (unit, module) in zip(stages, named, strict=False):
        for key, parameter in module.named_parameters():
            name = f"{unit}.{key}"
            first, other = owners.setdefault(id(parameter), (j, name))
            if first != j:
                raise ValueError(
                    f"the parameter {name!r} of stage {j} is also {other!r} of stage {first}: "
                    "stages update at different times, so they cannot share it; untie it, or "
                    "put both units into one stage"
                )


def _kind(module: nn.Module) -> Literal["coupling", "junction"]:
    return "coupling" if isinstance(module, Coupling) else "junction"
