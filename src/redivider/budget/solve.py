"""The cheapest choice for every unit such that no moment of a step exceeds a number of bytes.

While unit i runs, in the forward or the backward, units 0 to i hold what they keep, and those above
hold nothing yet or nothing any more. So for every i

    sum over j <= i of held(j)  +  extra(i)  <=  memory

Some tensors lie between units, and several units may keep them: a stream that one unit gives and
the next one keeps, or the pair at the top of a run of reversed couplings. They count once. Whether
a reversed coupling is a top depends on the unit above it.

Dynamic programming from the bottom: a state is what later units need to know of the lower ones, and
a front has the partial plans of a state of which none holds fewer bytes at no more cost than
another. Lagrange multipliers bound what the remaining units cost at least, and give plans for them.
The cheapest complete plan so far and the bounds discard nearly all partial plans. A first search
keeps a few of them per state; a second one is exact where a front has few; a third one is exact up
to NUM_MOST. These extend plans by several units at a time, as equal units have few sums of bytes
and costs. Units that all differ may have more partial plans than that. Then the best plan of the
last search is taken.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTHS = (5, 512, 4096)  # partial plans to keep per state, in the searches, if there are many
NUM_MANY, NUM_MOST = 2048, 16384  # partial plans per state
NUM_STEPS = 8  # per state, at which a block of units is complete
NUM_PRICES = 6  # that are tried
PRICES = (1.0, 0.0, 0.97, 1.03)  # of bounds, in units of that at which the memory is used up
FAR = 2.0**100  # more bytes and more cost than any plan has
Key: TypeAlias = Hashable  # names a tensor between units
State: TypeAlias = tuple[int, frozenset[Key]]
"""Choice of the unit below if it may be a top, else -1; kept tensors that later units may share."""


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
    """Added work or time, not negative."""
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

    def by_bytes(self) -> "Problem":
        """Return the problem in which an option costs the bytes that it takes beyond others."""

        def size(option: Option) -> int:
            keys = {*option.keeps, *option.pair}
            return option.held + self.size(keys) + max(peak.extra for peak in option.peaks)

        units = []
        for own in self.units:
            least = min(map(size, own))
            units.append([replace(option, cost=size(option) - least) for option in own])
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
        # What the units above need at least is needed before a step, too.
        needs = dict.fromkeys(states, 0)
        for index, here in reversed(list(enumerate(steps))):
            steps[index] = {
                before: [s._replace(need=max(s.need, s.held + needs[s.state])) for s in own]
                for before, own in here.items()
            }
            needs = {s: min(step.need for step in own) for s, own in steps[index].items()}
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
        return Step((number,), state, option.cost, held, need)


class Step(NamedTuple):
    """Options of a unit, or of a few, in a state: the state after them, their cost, and bytes."""

    numbers: tuple[int, ...]
    state: State
    cost: float
    held: int
    """Bytes that it adds to those held."""
    need: int
    """Bytes that must be free before it, for it and all units above."""


_END = Option("", 0, 0, (), ())


def _keys(options: Sequence[Option]) -> set[Key]:
    peaks = [peak for option in options for peak in (*option.peaks, *option.top)]
    kept = {key for option in options for key in (*option.keeps, *option.pair)}
    return kept | {key for peak in peaks for key in peak.alive}


def solve(problem: Problem, memory: int) -> list[int] | None:
    """Return the index of the cheapest option of every unit, or None if nothing fits."""
    if find_least(problem) > memory:
        return None
    bounds = _make_bounds(problem, memory)
    incumbent = Incumbent(None, _estimate(problem, memory, bounds))
    for width, num_many in ((WIDTHS[1], NUM_MANY), (WIDTHS[2], NUM_MOST)):
        incumbent, is_exact = _search(problem, memory, bounds, incumbent, width, num_many)
        if is_exact:
            break
    if incumbent.plan is None:  # the plan of the estimate was among those that were not kept
        incumbent, _ = _search(problem, memory, bounds, Incumbent(None, inf), WIDTHS[1], NUM_MANY)
    assert incumbent.plan is not None
    return incumbent.plan[:-1]  # without the end


def find_least(problem: Problem) -> int:
    """Return the smallest number of bytes for which there is a plan."""
    return min(step.need for own in problem.steps[0].values() for step in own)


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
Layer: TypeAlias = tuple[list[list[tuple[int, ...]]], Tensor, Tensor]
"""Choices of a block by the state before it, states of the plans before it, and for every plan the
number of its choice times the number of plans before it, plus that of its own."""


class Rest(NamedTuple):
    """Plan for the units above a state that is cheapest if the bytes of its peak have a price."""

    value: float
    """Lower bound on the sum of cost and priced peak, of all plans."""
    peak: int
    cost: float


class Bounds(NamedTuple):
    """Plans for the units above every state, by prices of a byte."""

    prices: list[float]
    """The last one is that of a plan that fits, and may be too large for an exact bound."""
    rests: list[dict[State, list[Rest]]]
    """Above none of the units, and above every unit."""
    slack: float
    """Cost that rounding may add."""


class Incumbent(NamedTuple):
    """The cheapest plan so far."""

    plan: list[int] | None
    """Choices of the units and of the end; None if only the cost is known."""
    most: float
    """Its cost, and what rounding may add."""


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
            rest = _follow(problem, bounds, index + 1, states[int(above[place])], number)
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


def _follow(problem: Problem, bounds: Bounds, index: int, state: State, number: int) -> list[int]:
    """Return the choices of a plan for the units above a state, and of the end."""
    plan, price = list[int](), bounds.prices[number]
    for steps, rests, above in zip(
        problem.steps[index:], bounds.rests[index:], bounds.rests[index + 1 :], strict=False
    ):
        wanted = rests[state][number]
        step = next(s for s in steps[state] if _is_below(s, above[s.state][number], wanted, price))
        plan, state = [*plan, *step.numbers], step.state
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


def _make_bounds(problem: Problem, memory: int) -> Bounds:
    """Return lower bounds by Lagrange multipliers: bytes beyond the memory cost a price.

    A plan that fits has none, so the bounds hold for it.
    """
    price, fitting = _find_price(problem, memory)
    prices = [*(factor * price for factor in PRICES), fitting]
    tables = [_find_rests(problem, price) for price in prices]
    rests = [
        {state: [own[state] for own in row] for state in row[0]}
        for row in zip(*tables, strict=True)
    ]
    total = sum(max(option.cost for option in options) for options in problem.units)
    return Bounds(prices, rests, 1e-9 * total + 1e-12 * price * memory)


def _find_price(problem: Problem, memory: int) -> tuple[float, float]:
    """Return the price of a byte at which the memory is just used up, and one with a plan."""
    ratios = [
        (step.cost - other.cost) / (other.held - step.held)
        for steps in problem.steps
        for own in steps.values()
        for step, other in product(own, own)
        if other.held > step.held and other.cost < step.cost
    ]
    # Each price has a plan, whose cost and peak are a line over prices. The lines of a plan that
    # takes too much and one that does not cross at a price between theirs.
    price, fitting = 0.0, max(ratios, default=0.0)
    low, high = _line(problem, 0.0), _line(problem, fitting)
    for _ in range(NUM_PRICES):
        if low[1] <= memory or low[1] <= high[1]:
            break
        price = max(0.0, (high[0] - low[0]) / (low[1] - high[1]))
        line = _line(problem, price)
        if line in (low, high):
            break
        if line[1] > memory:
            low = line
        else:
            high, fitting = line, price
    return price, fitting


def _line(problem: Problem, price: float) -> tuple[float, int]:
    """Return the cost and the peak of the best plan at a price."""
    (rest,) = _find_rests(problem, price)[0].values()
    return rest.cost, rest.peak


def _find_rests(problem: Problem, price: float) -> list[dict[State, Rest]]:
    """Return the plans above every state that are best at a price."""
    rests = {step.state: Rest(0.0, 0, 0.0) for own in problem.steps[-1].values() for step in own}
    rows = [rests]
    for steps in reversed(problem.steps):
        longer = {}
        for state, own in steps.items():
            best = inf, 0, 0.0
            for _, after, cost, held, need in own:
                value, peak, more = rests[after]
                value = cost + max(price * need, price * held + value)
                if value <= best[0]:
                    peak = max(need, held + peak)
                    if value < best[0] or peak < best[1]:
                        best = value, peak, cost + more
            longer[state] = Rest(*best)
        rows.append(rests := longer)
    return rows[::-1]


def _is_below(step: Step, rest: Rest, longer: Rest, price: float) -> bool:
    """Return whether a step and the plan above it are a longer plan of `_find_rests`."""
    value = step.cost + max(price * step.need, price * step.held + rest.value)
    return (value, max(step.need, step.held + rest.peak), step.cost + rest.cost) == longer


def _tensor(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
