"""The cheapest choice for every unit such that no moment of a step exceeds a number of bytes.

While unit i runs, in the forward or the backward, units 0 to i hold what they keep, and those above
hold nothing yet or nothing any more. So for every i

    sum over j <= i of held(j)  +  extra(i)  <=  memory

Some tensors lie between units, and several units may keep them: a stream that one unit gives and
the next one keeps, or the pair at the top of a run of reversed couplings. They count once. Whether
a reversed coupling is a top depends on the unit above it.

Dynamic programming from the bottom: a state is what later units need to know of the lower ones, and
a front has the partial plans of a state of which none holds fewer bytes at no more cost than
another. Lagrange multipliers bound what the remaining units cost at least. A first search keeps a
few partial plans per state. The cost of its plan and the bound discard nearly all partial plans of
the second search, which is exact.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

WIDTHS = (5, 64)  # partial plans to keep per state in the first searches: below, and near the end
NUM_LAST = 60  # units near the end, where the last bytes are filled
NUM_NARROWER = 2  # searches for a cheaper plan, after the first one
NUM_PRICES = 6  # that are tried
PRICES = (1.0, 0.0, 0.95, 1.05)  # of bounds, in units of that at which the memory is used up
GAP = 2**-8  # between the bound and the plan of the first search, at first
Key: TypeAlias = Hashable  # names a tensor between units
State: TypeAlias = tuple[int, frozenset[Key]]
"""Choice of the unit below if it may be a top, else -1; kept tensors that later units may share."""
Fronts: TypeAlias = dict[State, Tensor]
"""Bytes held (first row) and added cost (second row, ascending) of partial plans, in float64."""


class Peak(NamedTuple):
    """A moment in which a unit needs bytes beyond those that it and lower units hold."""

    alive: tuple[Key, ...]
    """Tensors between units that are there, kept or not."""
    extra: int


@dataclass(frozen=True)
class Option:
    """One choice for a unit: what it costs and what it needs."""

    choice: str
    cost: float
    """Added work or time."""
    held: int
    """Bytes that no other unit shares, between its forward and its backward."""
    keeps: tuple[Key, ...]
    """Tensors between units that it holds as well."""
    peaks: tuple[Peak, ...]
    pair: tuple[Key, ...] = ()
    """Output of a reversed coupling, which it keeps unless the unit above is reversed, too."""
    top: tuple[Peak, ...] = ()
    """Peaks of a reversed coupling that keeps its output."""


@dataclass(frozen=True)
class Problem:
    """Options of every unit, from the bottom, and the sizes of tensors between units."""

    units: Sequence[Sequence[Option]]
    sizes: Mapping[Key, int]
    always: int = 0
    """Bytes that are there in every moment."""

    def size(self, keys: Iterable[Key]) -> int:
        """Return the bytes of some tensors."""
        return sum(self.sizes[key] for key in keys)

    def without(self, choice: str) -> "Problem":
        """Return the problem without the options of a choice."""
        units = [[option for option in own if option.choice != choice] for own in self.units]
        return replace(self, units=units)

    def need(self, peaks: Iterable[Peak], kept: frozenset[Key]) -> int:
        """Return the bytes of the largest peak, beyond what is held."""
        needs = (self.size({*alive} - kept) + extra for alive, extra in peaks)
        return self.always + max(needs, default=0)

    @cached_property
    def steps(self) -> list[dict[State, list["Step"]]]:
        """Options of every unit, and an end above them, by the state before."""
        # The choice of a reversed coupling is settled by the unit above it.
        last_use = {
            key: index + any(option.pair for option in options)
            for index, options in enumerate(self.units)
            for key in _keys(options)
        }
        states: set[State] = {(-1, frozenset())}
        steps: list[dict[State, list[Step]]] = []
        for index, options in enumerate([*self.units, [_END]]):
            below = self.units[index - 1]
            steps.append(
                {
                    state: [
                        self._step(state, below, number, option, index, last_use)
                        for number, option in enumerate(options)
                    ]
                    for state in states
                }
            )
            states = {step.state for own in steps[-1].values() for step in own}
        return steps

    def _step(
        self,
        state: State,
        below: Sequence[Option],
        number: int,
        option: Option,
        index: int,
        last_use: Mapping[Key, int],
    ) -> "Step":
        pending, kept = state
        held = need = 0
        if pending >= 0:  # now it is known whether the unit below is a top
            if not option.pair:
                held = self.size({*below[pending].pair} - kept)
                kept |= {*below[pending].pair}
            peaks = below[pending].peaks if option.pair else below[pending].top
            need = held + self.need(peaks, kept)
        held += option.held + self.size({*option.keeps} - kept)
        kept |= {*option.keeps}
        if not option.pair:
            need = max(need, held + self.need(option.peaks, kept))
        known = frozenset(key for key in kept if last_use[key] > index)
        state = (number if option.pair else -1, known)
        return Step(number, state, option.cost, held, need)


class Step(NamedTuple):
    """An option in a state: the state after it, its cost, and bytes."""

    number: int
    state: State
    cost: float
    held: int
    """Bytes that it adds to those held."""
    need: int
    """Bytes that must be free before it."""


_END = Option("", 0, 0, (), ())


def _keys(options: Sequence[Option]) -> set[Key]:
    peaks = [peak for option in options for peak in (*option.peaks, *option.top)]
    kept = {key for option in options for key in (*option.keeps, *option.pair)}
    return kept | {key for peak in peaks for key in peak.alive}


def solve(problem: Problem, memory: int) -> list[int] | None:
    """Return the index of the cheapest option of every unit, or None if nothing fits."""
    if find_least(problem) > memory:
        return None
    bounds, least = _make_bounds(problem, memory)
    total = sum(max(option.cost for option in options) for options in problem.units) or 1.0
    most = _estimate(problem, memory, bounds, least, total)
    # A little more, so that rounding does not discard this plan.
    fronts = _search(problem, memory, bounds, most + 1e-9 * total)
    return _read(problem, memory, fronts)


def find_least(problem: Problem) -> int:
    """Return the smallest number of bytes for which there is a plan."""
    needs = {step.state: 0 for own in problem.steps[-1].values() for step in own}
    for steps in reversed(problem.steps):
        needs = {
            state: min(max(need, held + needs[after]) for _, after, _, held, need in own)
            for state, own in steps.items()
        }
    return min(needs.values())


def trace(problem: Problem, choices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bytes held by the units up to every unit, and its peak with them."""
    kept: frozenset[Key] = frozenset()
    options = [own[choice] for own, choice in zip(problem.units, choices, strict=True)]
    held, rows = 0, []
    for option, above in zip(options, [*options[1:], _END], strict=True):
        is_top = bool(option.pair) and not above.pair
        keys = {*option.keeps, *(option.pair if is_top else ())} - kept
        kept |= keys
        held += option.held + problem.size(keys)
        rows.append((held, held + problem.need(option.top if is_top else option.peaks, kept)))
    return rows


Steps: TypeAlias = dict[State, list[Step]]
"""Steps of a unit, by the state before."""


class Bounds(NamedTuple):
    """Lower bounds on the cost above a state: the largest constant + price * bytes held there."""

    prices: list[float]
    constants: list[dict[State, list[float]]]
    """Above every unit, and above none."""

    def prune(self, steps: Sequence[Steps], most: float) -> list[Steps]:
        """Return the steps that a plan may have which costs less."""
        price, pruned = self.prices[0], []
        priced = {(-1, frozenset[Key]()): 0.0}  # least cost and priced bytes of the units below
        for here, constants in zip(steps, self.constants[1:], strict=True):
            below, priced = priced, {}
            pruned.append({before: list[Step]() for before in below})
            for before, value in below.items():
                for step in here[before]:
                    cost = value + step.cost + price * step.held
                    if cost + constants[step.state][0] < most:
                        pruned[-1][before].append(step)
                        priced[step.state] = min(cost, priced.get(step.state, inf))
        return pruned


def _estimate(problem: Problem, memory: int, bounds: Bounds, least: float, total: float) -> float:
    """Return the cost of a good plan, from searches that keep few partial plans per state."""
    gap = max(GAP * least, 1e-6 * total)
    while (cost := _search_few(problem, memory, bounds, least + gap)) is None:
        gap *= 8
    # In a narrower band of costs, the same number of partial plans represents the others better.
    for _ in range(NUM_NARROWER):
        most = (least + cost) / 2
        cheaper = _search_few(problem, memory, bounds, most)
        least, cost = (most, cost) if cheaper is None else (least, cheaper)
    return cost


def _search_few(problem: Problem, memory: int, bounds: Bounds, most: float) -> float | None:
    """Return the cost of a plan that fits and costs less, if there is one among a few."""
    fronts: dict[State, list[tuple[int, float]]] = {(-1, frozenset()): [(0, 0.0)]}
    pruned = bounds.prune(problem.steps, most)
    for index, (constants, steps) in enumerate(zip(bounds.constants[1:], pruned, strict=True)):
        width = WIDTHS[index >= len(pruned) - NUM_LAST]
        longer: dict[State, list[tuple[int, float]]] = {}
        for before, front in fronts.items():
            for _, after, cost, held, need in steps[before]:
                extended = [(h + held, c + cost) for h, c in front if h + need <= memory]
                longer.setdefault(after, []).extend(extended)
        fronts = {}
        for state, partials in longer.items():
            lines = list(zip(constants[state], bounds.prices, strict=True))
            bounded: list[tuple[float, int, float]] = []
            lowest = inf
            for held, cost in sorted(partials):
                if cost < lowest:
                    lowest = cost
                    bound = cost + max([constant + price * held for constant, price in lines])
                    if bound < most:
                        bounded.append((bound, held, cost))
            if bounded:
                # Keep the one that holds least, and the best ones of ranges of bytes.
                first, size = bounded[0], 1 + (bounded[-1][1] - bounded[0][1]) // width
                best = {-1: first}
                for partial in bounded[1:]:
                    place = (partial[1] - first[1]) // size
                    best[place] = min(best.get(place, partial), partial)
                fronts[state] = [(held, cost) for _, held, cost in best.values()]
    return min((cost for front in fronts.values() for _, cost in front), default=None)


def _search(problem: Problem, memory: int, bounds: Bounds, most: float) -> list[Fronts]:
    """Return the fronts below every unit, and at the end, of plans that fit and cost less."""
    prices = _tensor(bounds.prices)[:, None]
    rows = torch.tensor([0, 1, 0], device="cpu")  # bytes held, cost, and bytes at the peak
    fronts: list[Fronts] = [{(-1, frozenset()): _tensor([[0], [0]])}]
    pruned = bounds.prune(problem.steps, most)
    for constants, steps in zip(bounds.constants[1:], pruned, strict=True):
        longer: dict[State, list[Tensor]] = {}
        for before, front in fronts[-1].items():
            base = front.index_select(0, rows).unsqueeze(1)
            for after, added in _group(steps[before]).items():
                partials = base + _tensor(added).T.unsqueeze(2)
                longer.setdefault(after, []).append(partials.flatten(1))
        fronts.append({})
        for state, tensors in longer.items():
            held, costs, peaks = partials = torch.cat(tensors, 1)
            bound = torch.addcmul(_tensor(constants[state])[:, None], prices, held).amax(0)
            keep = (peaks <= memory) & (costs + bound < most)
            front = _front(partials[:2].index_select(1, keep.nonzero().flatten()))
            if front.shape[1]:
                fronts[-1][state] = front
    return fronts


def _group(steps: Iterable[Step]) -> dict[State, list[tuple[int, float, int]]]:
    """Return bytes, cost and need of steps, by the state after them."""
    groups: dict[State, list[tuple[int, float, int]]] = {}
    for _, state, cost, held, need in steps:
        groups.setdefault(state, []).append((held, cost, need))
    return groups


def _front(partials: Tensor) -> Tensor:
    """Return, by cost, the partial plans that none of the others beats."""
    costs, order = partials[1].sort()
    held = partials[0].index_select(0, order)
    least = torch.cat((_tensor([inf]), held.cummin(0).values[:-1]))[: len(held)]
    places = (held < least).nonzero().flatten()
    costs = costs.index_select(0, places)
    # Of those with equal costs, the last holds least.
    last = torch.cat((costs[1:] > costs[:-1], costs[:1] < inf)).nonzero().flatten()
    return partials.index_select(1, order.index_select(0, places.index_select(0, last)))


def _read(problem: Problem, memory: int, fronts: list[Fronts]) -> list[int]:
    """Return the choices of the cheapest plan."""
    ends = [(*front[:, 0].tolist(), state) for state, front in fronts[-1].items()]
    held, cost, state = min(ends, key=lambda end: (end[1], end[0]))
    choices = []
    for steps, below in zip(reversed(problem.steps), reversed(fronts[:-1]), strict=True):
        steps_by_state = [(own, step) for own in below for step in steps[own]]
        for own, step in steps_by_state:
            before = held - step.held
            if step.state == state and before + step.need <= memory:
                costs = below[own][1][below[own][0] == before].tolist()
                if costs and costs[0] + step.cost == cost:
                    choices.append(step.number)
                    held, cost, state = before, costs[0], own
                    break
    return choices[:0:-1]  # without the end


def _make_bounds(problem: Problem, memory: int) -> tuple[Bounds, float]:
    """Return lower bounds by Lagrange multipliers: bytes beyond the memory cost a price.

    A plan that fits has none, so the bounds hold for it. Return the bound for all plans, too.
    """
    price = _find_price(problem, memory)
    prices = [factor * price for factor in PRICES]
    tables = [(_priced(problem, price)[0], price) for price in prices]
    above = [
        {
            state: [values[index][state] - price * memory for values, price in tables]
            for state in tables[0][0][index]
        }
        for index in range(len(problem.steps) + 1)
    ]
    (bounds,) = above[0].values()
    return Bounds(prices, above), max(bounds)


def _find_price(problem: Problem, memory: int) -> float:
    """Return the price of a byte at which the memory is just used up."""
    ratios = [
        (step.cost - other.cost) / (other.held - step.held)
        for steps in problem.steps
        for own in steps.values()
        for step, other in product(own, own)
        if other.held > step.held and other.cost < step.cost
    ]
    # Each price has a plan, whose cost and peak are a line over prices. The lines of a plan that
    # takes too much and one that does not cross at a price between theirs.
    low, high = _line(problem, 0.0), _line(problem, max(ratios, default=0.0))
    price = 0.0
    for _ in range(NUM_PRICES):
        if low[1] <= memory or low[1] <= high[1]:
            break
        price = max(0.0, (high[0] - low[0]) / (low[1] - high[1]))
        line = _line(problem, price)
        if line in (low, high):
            break
        low, high = (line, high) if line[1] > memory else (low, line)
    return price


def _line(problem: Problem, price: float) -> tuple[float, int]:
    """Return the cost and the peak of the best plan at a price."""
    least, peak = _priced(problem, price)
    return min(least[0].values()) - price * peak, peak


def _priced(problem: Problem, price: float) -> tuple[list[dict[State, float]], int]:
    """Return the least sum of cost and priced peak above every state, and the peak from below."""
    values = {step.state: (0.0, 0) for own in problem.steps[-1].values() for step in own}
    least = [{state: value for state, (value, _) in values.items()}]
    for steps in reversed(problem.steps):
        values = {
            state: min(
                [
                    (
                        cost + max(price * need, price * held + values[after][0]),
                        max(need, held + values[after][1]),
                    )
                    for _, after, cost, held, need in own
                ]
            )
            for state, own in steps.items()
        }
        least.append({state: value for state, (value, _) in values.items()})
    ((_, peak),) = values.values()
    return least[::-1], peak


def _tensor(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
