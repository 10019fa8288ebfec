"""The cheapest choice for every unit such that no moment of a step exceeds a number of bytes.

Dynamic programming from the bottom: a state is what later units need to know of the lower ones, and
a front has the partial plans of a state of which none holds fewer bytes at no more cost than
another. The cheapest complete plan so far and the bounds (bounds.py) discard nearly all partial
plans. A first search keeps a few of them per state; a second one is exact where a front has few; a
third one is exact up to NUM_MOST. These extend plans by several units at a time, as equal units
have few sums of bytes and costs. Units that all differ may have more partial plans than that. Then
the best plan of the last search is taken.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from redivider.budget.bounds import Bounds, Rest, follow, make_bounds
from redivider.budget.problem import Key, Problem, State, Step, find_least

WIDTHS = (5, 512, 4096)  # partial plans to keep per state, in the searches, if there are many
NUM_MANY, NUM_MOST = 2048, 16384  # partial plans per state
NUM_STEPS = 8  # per state, at which a block of units is complete
FAR = 2.0**100  # more bytes and more cost than any plan has
Steps: TypeAlias = dict[State, list[Step]]
"""Steps of a unit, by the state before."""
Layer: TypeAlias = tuple[list[list[tuple[int, ...]]], Tensor, Tensor]
"""Choices of a block by the state before it, states of the plans before it, and for every plan the
number of its choice times the number of plans before it, plus that of its own."""


class Incumbent(NamedTuple):
    """The cheapest plan so far."""

    plan: list[int] | None
    """Choices of the units and of the end; None if only the cost is known."""
    most: float
    """Its cost, and what rounding may add."""


def solve(problem: Problem, memory: int) -> list[int] | None:
    """Return the index of the cheapest option of every unit, or None if nothing fits."""
    if find_least(problem) > memory:
        return None
    bounds = make_bounds(problem, memory)
    incumbent = Incumbent(None, _estimate(problem, memory, bounds))
    for width, num_many in ((WIDTHS[1], NUM_MANY), (WIDTHS[2], NUM_MOST)):
        incumbent, is_exact = _search(problem, memory, bounds, incumbent, width, num_many)
        if is_exact:
            break
    if incumbent.plan is None:  # the plan of the estimate was among those that were not kept
        incumbent, _ = _search(problem, memory, bounds, Incumbent(None, inf), WIDTHS[1], NUM_MANY)
    assert incumbent.plan is not None
    return incumbent.plan[:-1]  # without the end


def _estimate(problem: Problem, memory: int, bounds: Bounds) -> float:
    """Return the cost of a good plan, from a search that keeps few partial plans per state."""
    prices, most = bounds.prices[:-1], inf
    fronts: dict[State, list[tuple[int, float]]] = {(-1, frozenset()): [(0, 0.0)]}
    for steps, rests in zip(problem.steps, bounds.rests[1:], strict=True):
        longer: dict[State, list[tuple[int, float]]] = {}
        for before, front in fronts.items():
            for _, after, cost, held, need in steps[before]:
                extended = [(h + held, c + cost) for h, c in front if h + need <= memory]
                longer.setdefault(after, []).extend(extended)
        fronts = {}
        for state, partials in longer.items():
            lines = [(p, rests[state][i].value - p * memory) for i, p in enumerate(prices)]
            bounded: list[tuple[float, int, float]] = []
            lowest = inf
            for held, cost in sorted(partials):
                if cost < lowest:
                    lowest = cost
                    bound = cost + max([p * held + constant for p, constant in lines])
                    if bound <= most:
                        bounded.append((bound, held, cost))
            if bounded:
                for _, peak, more in rests[state]:
                    last = bisect_right(bounded, memory - peak, key=itemgetter(1)) - 1
                    if last >= 0:
                        most = min(most, bounded[last][2] + more + bounds.slack)
                # Keep the one that holds least, and the best ones of ranges of bytes.
                first, size = bounded[0], 1 + (bounded[-1][1] - bounded[0][1]) // WIDTHS[0]
                best = {-1: first}
                for partial in bounded[1:]:
                    place = (partial[1] - first[1]) // size
                    best[place] = min(best.get(place, partial), partial)
                fronts[state] = [(held, cost) for _, held, cost in best.values()]
    return most


def _search(
    problem: Problem, memory: int, bounds: Bounds, incumbent: Incumbent, width: int, num_many: int
) -> tuple[Incumbent, bool]:
    """Return the cheapest plan, and whether no partial plan was dropped that may lead to it.

    Args:
        problem: The problem.
        memory: Bytes that a plan may take.
        bounds: Plans for the units above every state.
        incumbent: The cheapest plan so far.
        width: Number of partial plans to keep per state, if there are many.
        num_many: How many that is.
    """
    plan, most = incumbent
    price, prices = bounds.prices[0], _tensor(bounds.prices)[:-1, None]
    # Whether a partial plan is in every state, the bytes that it holds, and its cost.
    front, label = _tensor([[1], [0], [0]]), torch.zeros(1, dtype=torch.int64, device="cpu")
    layers: list[Layer] = []
    is_exact = True
    below = {(-1, frozenset[Key]()): 0.0}  # least cost and priced bytes of the units below
    block = {state: [Step((), state, 0, 0, 0)] for state in below}
    for index, (steps, rests) in enumerate(zip(problem.steps, bounds.rests[1:], strict=True)):
        limit = most + price * memory
        for state, lower in block.items():
            limits = {after: limit - below[state] - rests[after][0].value for after in rests}
            block[state] = _join(lower, steps, price, limits)
        if not any(block.values()):
            break
        if max(map(len, block.values())) < NUM_STEPS and steps is not problem.steps[-1]:
            continue
        rows, states = _tabulate(block, rests, price, memory, limit)
        choices = [[step.numbers for step in own] for own in block.values()]
        # Bytes held, cost, state, bytes beyond the memory, and bound beyond that of a plan.
        longer = (rows @ front).view(5, -1)
        places = (longer[3:].amax(0) <= 0).nonzero().flatten()
        if not len(places):
            break
        costs, order = longer[1].index_select(0, places).sort(stable=True)
        places = places.index_select(0, order)
        held, numbers = longer[:3:2].index_select(1, places)
        # In every state, keep those that hold less than all cheaper ones.
        held = torch.where(numbers == _tensor(range(len(states)))[:, None], held, inf)
        least = pad(held.cummin(1).values[:, :-1], (1, 0), value=inf)
        above, kept = (held < least).nonzero().unbind(1)
        costs, held = costs.index_select(0, kept), held.amin(0).index_select(0, kept)
        table = _tensor([rests[state] for state in states]).index_select(0, above)
        values, peaks, more = table.permute(2, 1, 0)
        fits = torch.where(peaks + held <= memory, more + costs, inf)
        cost = float(fits.min())
        if cost + bounds.slack < most or (plan is None and cost <= most):
            number, place = divmod(int(fits.argmin()), len(kept))
            first = _read([*layers, (choices, label, places.index_select(0, kept))], place)
            rest = follow(problem, bounds, index + 1, states[int(above[place])], number)
            plan, most = first + rest, min(most, cost + bounds.slack)
        bound = costs + (values[:-1] + prices * (held - memory)).amax(0)
        keep = bound <= most
        keep[:-1] &= (costs[1:] > costs[:-1]) | (above[1:] > above[:-1])  # the last holds least
        if len(kept) > num_many * len(states):
            is_exact = False
            keep &= _thin(above, held, bound, width)
        keep = keep.nonzero().flatten()
        above, kept, costs, held = (t.index_select(0, keep) for t in (above, kept, costs, held))
        layers.append((choices, label, places.index_select(0, kept)))
        label = above
        hot = label == torch.arange(len(states), device="cpu")[:, None]
        front = torch.cat((hot, held[None], costs[None]))
        values = [
            (step.state, below[before] + step.cost + price * step.held)
            for before, own in block.items()
            for step in own
        ]
        below = dict(sorted(values, key=itemgetter(1), reverse=True))  # the least one is last
        block = {state: [Step((), state, 0, 0, 0)] for state in states}
    return Incumbent(plan, most), is_exact


def _join(
    lower: Sequence[Step], upper: Steps, price: float, limits: Mapping[State, float]
) -> list[Step]:
    """Return steps of a block and the unit above it of which none beats another.

    Those whose cost and priced bytes are larger than the limit of their state are left out.
    """
    groups: dict[State, list[tuple[float, int, int, tuple[int, ...]]]] = {}
    for numbers, between, cost, held, need in reversed(lower):  # of equal plans, store at the top
        for step in upper[between]:
            total, after = cost + step.cost, step.state
            if total + price * (held + step.held) <= limits[after]:
                needed = max(need, held + step.need)
                row = (total, held + step.held, needed, numbers + step.numbers)
                groups.setdefault(after, []).append(row)
    joined: list[Step] = []
    for after, rows in groups.items():
        front: list[tuple[int, int]] = []
        for cost, held, need, numbers in sorted(rows, key=itemgetter(0, 1, 2)):
            if not any([h <= held and n <= need for h, n in front]):
                front.insert(0, (held, need))
                joined.append(Step(numbers, after, cost, held, need))
    return joined


def _thin(states: Tensor, held: Tensor, bound: Tensor, width: int) -> Tensor:
    """Return whether to keep partial plans: the best ones of ranges of bytes, by state."""
    low, high = held.aminmax()
    ranges = ((held - low) * ((width - 1) / (high - low + 1))).long() + states * width
    best = bound.new_full((int(ranges.max()) + 1,), inf)
    return bound <= best.scatter_reduce_(0, ranges, bound, "amin").index_select(0, ranges)


def _read(layers: Sequence[Layer], place: int) -> list[int]:
    """Return the choices of a partial plan."""
    plan = list[int]()
    for choices, before, places in reversed(layers):
        step, place = divmod(int(places[place]), len(before))
        plan[:0] = choices[int(before[place])][step]
    return plan


def _tabulate(
    block: Steps, rests: Mapping[State, list[Rest]], price: float, memory: int, limit: float
) -> tuple[Tensor, list[State]]:
    """Return a matrix that extends partial plans by every step of a block, and the states after it.

    It has rows for bytes held, cost, state, bytes beyond the memory, and cost beyond the limit.
    """
    states = dict.fromkeys(step.state for own in block.values() for step in own)
    numbers = {state: number for number, state in enumerate(states)}
    columns: list[list[tuple[float, ...]]] = [
        [
            (held, cost, numbers[after], need - memory, cost + price * held + rests[after][0].value)
            for _, after, cost, held, need in own
        ]
        for own in block.values()
    ]
    length = max(map(len, columns))
    missing = (0, 0, 0, FAR, 0)
    table = _tensor([own + [missing] * (length - len(own)) for own in columns])
    table[..., 4] -= min(limit, FAR)  # infinity times zero is no number
    # Every row adds bytes or cost of a partial plan to those of its step.
    own = _tensor([[1, 0], [0, 1], [0, 0], [1, 0], [price, 1]])
    own = own[:, None].expand(5, length, 2)
    return torch.cat((table.permute(2, 1, 0), own), 2).flatten(0, 1), list(states)


def _tensor(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
