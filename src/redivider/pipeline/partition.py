"""Partition of a model's units into stages of consecutive units, balanced by cost.

A cut is a list of sizes, one per stage. The best cut has the cheapest largest stage. Dynamic
programming finds it. Among equals the cut with the larger stages in front wins, so the same costs
always give the same cut.

    costs   1  1 | 2  1 | 3        cut [2, 2, 1], loads [2, 3, 3], balance 8 / 3
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import nn

from redivider.chain import Chain, name_unit, taken
from redivider.checks.flops import counting_flops
from redivider.checks.restore import restored
from redivider.errors import naming, not_one_of
from redivider.tree import map_tensors, tensors_of

COSTS = ("units", "work", "time")


def units_of(model: Any) -> dict[str, nn.Module]:
    """Return the units of a chain, a Sequential, a module with `units()`, or a list, by name."""
    if isinstance(model, nn.Module):
        get_units = getattr(model, "units", None)
        if get_units is None and isinstance(model, nn.Sequential):
            get_units = model.__iter__
        if not callable(get_units):
            raise TypeError(
                f"{type(model).__name__} has no units(); pass a Chain, a Sequential, a module with "
                "a method units(), or a list of units"
            )
        names = {id(module): name for name, module in model.named_modules()}
        units: list[nn.Module] = list(get_units())
        unknown = [type(unit).__name__ for unit in units if id(unit) not in names]
        if unknown:
            raise ValueError(f"units() gives modules that the model does not hold: {unknown}")
        named = {names[id(unit)]: unit for unit in units}
    else:
        chain = Chain(model)  # verifies the units and names them
        units = list(chain)
        named = dict(zip(chain._modules, units, strict=True))
    if len(named) != len({id(unit) for unit in units}) or len(named) != len(units):
        raise ValueError("a unit occurs twice; in a pipeline every unit has one place")
    return named


def cut_evenly(costs: Sequence[float], stages: int) -> list[int]:
    """Return the sizes of consecutive stages whose largest cost is as small as possible."""
    sums = [0.0, *accumulate(costs)]
    return cut_by(lambda stage, start, end: sums[end] - sums[start], len(costs), stages)


def cut_by(load: Callable[[int, int, int], float], num: int, stages: int) -> list[int]:
    """Return the sizes of consecutive stages whose largest load is as small as possible.

    Args:
        load: A function of the index of a stage, its first unit, and the one above its last.
        num: Number of units.
        stages: Number of stages.
    """
    if not 1 <= stages <= num:
        raise ValueError(
            f"{num} units cannot be cut into {stages} stages of at least one unit each"
        )
    # best[k][i]: smallest possible load of the largest stage, for units i, i + 1, ... in the last
    # k + 1 stages. The sizes are read off it afterwards.
    best = [[load(stages - 1, i, num) for i in range(num)]]
    for k in range(1, stages):
        best.append(
            [
                min(
                    (
                        max(load(stages - 1 - k, i, end), best[k - 1][end])
                        for end in range(i + 1, num - k + 1)
                    ),
                    default=float("inf"),
                )
                for i in range(num)
            ]
        )
    sizes, start = [], 0
    for k in range(stages - 1, 0, -1):
        ends = range(num - k, start, -1)  # from the largest first stage down
        stage = stages - 1 - k
        end = next(e for e in ends if max(load(stage, start, e), best[k - 1][e]) <= best[k][start])
        sizes.append(end - start)
        start = end
    return [*sizes, num - start]


def loads_of(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the costs of the stages."""
    ends = list(accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def balance_of(loads: Sequence[float]) -> float:
    """Return the total cost over that of the largest stage: the largest possible speed-up."""
    return sum(loads) / max(loads) if max(loads) > 0 else float(len(loads))


def count_costs(
    model: Any, by: str = "work", example: Any = None, repeats: int = 5, **side: Any
) -> list[float]:
    """Return the costs of the units.

    Args:
        model: A `Chain`, a module with `units()`, or a list of units.
        by: "units" for 1 each, "work" for the FLOPs of the forward, "time" for the median seconds
            of forward and backward.
        example: Input of the model, for "work" and "time".
        repeats: Number of timed runs, for "time".
        side: Keywords of the units.
    """
    units = units_of(model)
    if by not in COSTS:
        raise ValueError(not_one_of("by", by, COSTS))
    if by == "units":
        return [1.0] * len(units)
    if example is None:
        raise ValueError(f"by={by!r} needs an example: a micro-batch like those to be trained on")
    measure = _work if by == "work" else lambda *args: _seconds(*args, repeats=repeats)
    chain = Chain(units.values())
    costs = []
    with restored(chain):
        for index, (name, unit) in enumerate(units.items()):
            with naming(name_unit(index, unit, name)):
                example, cost = measure(unit, example, taken(unit, side))
                costs.append(cost)
    return costs


def _work(unit: nn.Module, x: Any, side: dict[str, Any]) -> tuple[Any, float]:
    with torch.no_grad(), counting_flops() as counter:
        y = unit(x, **side)
    return y, float(counter.get_total_flops())


def _seconds(unit: nn.Module, x: Any, side: dict[str, Any], *, repeats: int) -> tuple[Any, float]:
    seconds = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        leaf = as_leaves(x)
        y = unit(leaf, **side)
        outputs = [tensor for tensor in tensors_of(y) if tensor.requires_grad]
        inputs = [t for t in (*unit.parameters(), *tensors_of(leaf)) if t.requires_grad]
        if outputs and inputs:
            grads = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        _synchronize()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        return unit(x, **side), median(seconds)


def as_leaves(x: Any) -> Any:
    """Return an input detached, with tensors that require a gradient if they can have one."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), x)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
