"""Units into stages: consecutive, and as even as can be.

A cut is a list of sizes, one for each stage. The best one has the smallest largest stage; it is
found by dynamic programming, and among equals the one with the larger stages in front is taken, so
the same costs always give the same cut.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from redivider.chain import Chain, name_unit, taken
from redivider.errors import naming
from redivider.verify import restored

WAYS = ("units", "work", "time")


def units_of(model: Any) -> dict[str, nn.Module]:
    """The units of a chain, of a module with `units()`, or of a list, by their names in it."""
    if isinstance(model, nn.Module):
        give_units = getattr(model, "units", None)
        if not callable(give_units):
            raise TypeError(
                f"{type(model).__name__} has no units(); pass a Chain, a module with a method "
                "units(), or a list of units"
            )
        names = {id(module): name for name, module in model.named_modules()}
        units: list[nn.Module] = list(give_units())
        strangers = [type(unit).__name__ for unit in units if id(unit) not in names]
        if strangers:
            raise ValueError(f"units() gives modules that the model does not hold: {strangers}")
        named = {names[id(unit)]: unit for unit in units}
    else:
        chain = Chain(model)  # which knows what units, and their names, may be
        units = list(chain)
        named = dict(zip(chain._modules, units, strict=True))
    if len(named) != len({id(unit) for unit in units}) or len(named) != len(units):
        raise ValueError("a unit occurs twice; in a pipeline every unit has one place")
    return named


def cut_evenly(costs: Sequence[float], stages: int) -> list[int]:
    """Sizes of consecutive groups whose largest sum of costs is as small as possible."""
    num = len(costs)
    if not 1 <= stages <= num:
        raise ValueError(
            f"{num} units cannot be cut into {stages} stages of at least one unit each"
        )
    sums = [0.0, *accumulate(costs)]
    # best[k][i]: the smallest largest sum of units i.. in k + 1 stages; sizes are read off it.
    best = [[sums[num] - sums[i] for i in range(num)]]
    for k in range(1, stages):
        best.append(
            [
                min(
                    (
                        max(sums[end] - sums[i], best[k - 1][end])
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
        end = next(e for e in ends if max(sums[e] - sums[start], best[k - 1][e]) <= best[k][start])
        sizes.append(end - start)
        start = end
    return [*sizes, num - start]


def loads_of(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """The cost of each stage."""
    ends = list(accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def balance_of(loads: Sequence[float]) -> float:
    """Total cost over the largest stage's: how many times faster than one stage it could be."""
    return sum(loads) / max(loads) if max(loads) > 0 else float(len(loads))


def count_costs(
    model: Any, by: str = "work", example: Any = None, repeats: int = 5, **side: Any
) -> list[float]:
    """The cost of each unit: 1, its FLOPs, or its seconds, forward and backward, on an example."""
    units = units_of(model)
    if by not in WAYS:
        raise ValueError(f"by must be one of {', '.join(map(repr, WAYS))}, got {by!r}")
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


def balance(
    model: Any, stages: int, *, by: str = "work", example: Any = None, **side: Any
) -> list[int]:
    """Find a cut to pin: the sizes of `stages` stages, balanced by "units", "work" or "time".

    sizes = rd.balance(model, 8, by="time", example=images)
    pipe = rd.Pipeline(model, stages=sizes, ...)
    """
    return cut_evenly(count_costs(model, by, example, **side), stages)


def _work(unit: nn.Module, x: Any, side: dict[str, Any]) -> tuple[Any, float]:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        y = unit(x, **side)
    return y, float(counter.get_total_flops())


def _seconds(unit: nn.Module, x: Any, side: dict[str, Any], *, repeats: int) -> tuple[Any, float]:
    spent = []
    for _ in range(repeats):
        _wait()
        start = time.perf_counter()
        leaf = _leaf(x)
        y = unit(leaf, **side)
        tops = [each for each in tree_leaves(y) if each.requires_grad]
        wanted = [each for each in (*unit.parameters(), *tree_leaves(leaf)) if each.requires_grad]
        if tops and wanted:
            ones = [torch.ones_like(each) for each in tops]
            torch.autograd.grad(tops, wanted, ones, allow_unused=True)
        _wait()
        spent.append(time.perf_counter() - start)
    with torch.no_grad():
        return unit(x, **side), median(spent)


def _leaf(x: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda each: each.detach().requires_grad_(each.is_floating_point()), x
    )


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
