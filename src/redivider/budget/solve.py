"""The cheapest choice for every unit such that no moment of a step exceeds a number of bytes.

While unit i runs, in the forward or the backward, units 0 to i hold what they keep, and those above
hold nothing yet or nothing any more. So for every i

    sum over j <= i of held(j)  +  extra(i)  <=  memory

Some tensors lie between units, and several units may keep them: a stream that one unit gives and
the next one keeps, or the pair at the top of a run of reversed couplings. They count once. Whether
a reversed coupling is a top depends on the unit above it.

Dynamic programming from the bottom: a state is what later units need to know of the lower ones, and
a front has the partial plans of a state of which none holds fewer bytes at no more cost than
another. A first pass keeps a few plans per state. Its result, with a bound on what the remaining
units cost at least, discards nearly all partial plans of the second pass, which is exact.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeAlias

WIDTHS = (16, None)  # partial plans to keep per state in every pass; the last one is exact
NUM_HALVINGS = 24  # in the search for a price
Key: TypeAlias = Hashable  # names a tensor between units
State: TypeAlias = tuple[int, frozenset[Key]]
"""Choice of the unit below if it may be a top, else -1; kept tensors that later units may share."""
Partial: TypeAlias = tuple[int, float]
"""Bytes held and added cost of a partial plan."""
Fronts: TypeAlias = dict[State, list[Partial]]


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
            known = {key for key, last in last_use.items() if last > index}
            below = self.units[index - 1]
            steps.append(
                {
                    state: [
                        self._step(state, below, number, option, known)
                        for number, option in enumerate(options)
                    ]
                    for state in states
                }
            )
            states = {step.state for own in steps[-1].values() for step in own}
        return steps

    def _step(
        self, state: State, below: Sequence[Option], number: int, option: Option, known: set[Key]
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
        state = (number if option.pair else -1, kept & known)
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
    bounds = _make_bounds(problem, memory)
    best, least = None, inf
    for width in WIDTHS:
        fronts = _search(problem, memory, bounds, width, least)
        if fronts is not None:
            best = fronts
            least = min(cost for front in fronts[-1].values() for _, cost in front)
        elif best is None:
            return None
    assert best is not None
    return _read(problem, memory, best)


def find_least(problem: Problem) -> int:
    """Return the smallest number of bytes for which there is a plan."""
    low, high = 0, max(peak for _, peak in trace(problem, [0] * len(problem.units)))
    while low < high:
        middle = (low + high) // 2
        if _search(problem, middle, None, 0, inf) is None:
            low = middle + 1
        else:
            high = middle
    return low


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


Bounds: TypeAlias = list[dict[State, list[tuple[float, float]]]]
"""Lower bounds on the cost that is added above a state: constant + price * bytes held there."""


def _search(
    problem: Problem, memory: int, bounds: Bounds | None, width: int | None, most: float
) -> list[Fronts] | None:
    """Return the fronts below every unit, and at the end, of plans that fit and cost less.

    Args:
        problem: The problem.
        memory: Bytes to stay within.
        bounds: Lower bounds on the cost of the remaining units.
        width: Number of partial plans to keep per state, besides the one that holds least.
        most: Cost of a plan that is known.
    """
    fronts: list[Fronts] = [{(-1, frozenset()): [(0, 0)]}]
    for index, steps in enumerate(problem.steps):
        longer: Fronts = {}
        for before, front in fronts[-1].items():
            for _, state, cost, held, need in steps[before]:
                num_fit = bisect_right(front, (memory - need, inf))
                extended = [(own + held, total + cost) for own, total in front[:num_fit]]
                longer.setdefault(state, []).extend(extended)
        kept = {}
        for state, partials in longer.items():
            lines = [(0.0, 0.0)] if bounds is None else bounds[index][state]
            front = _front(partials, lines, most)
            if width is not None and len(front) > width + 1:
                rest = sorted(front[1:], key=lambda p: p[1] + max(c + m * p[0] for c, m in lines))
                front = [front[0], *sorted(rest[:width])]
            if front:
                kept[state] = front
        if not kept:
            return None
        fronts.append(kept)
    return fronts


def _front(
    partials: list[Partial], lines: Sequence[tuple[float, float]], most: float
) -> list[Partial]:
    """Return, by bytes, the partial plans that none of the others beats and that may be cheaper."""
    partials.sort()
    front: list[Partial] = []
    least = inf
    for partial in partials:
        held, cost = partial
        if cost < least:
            least = cost
            for constant, price in lines:
                if cost + constant + price * held >= most:
                    break
            else:
                front.append(partial)
    return front


def _read(problem: Problem, memory: int, fronts: list[Fronts]) -> list[int]:
    """Return the choices of the cheapest plan."""
    ends = [(cost, held, state) for state, front in fronts[-1].items() for held, cost in front[-1:]]
    cost, held, state = min(ends, key=lambda end: end[:2])
    choices = []
    for steps, below in zip(reversed(problem.steps), reversed(fronts[:-1]), strict=True):
        steps_by_state = [(own, step) for own in below for step in steps[own]]
        for own, step in steps_by_state:
            place = bisect_left(below[own], (held - step.held, -inf))
            partial = below[own][place] if place < len(below[own]) else (-1, inf)
            fits = partial[0] == held - step.held and partial[0] + step.need <= memory
            if step.state == state and fits and partial[1] + step.cost == cost:
                choices.append(step.number)
                (held, cost), state = partial, own
                break
    return choices[:0:-1]  # without the end


def _make_bounds(problem: Problem, memory: int) -> Bounds:
    """Return lower bounds by Lagrange multipliers: bytes beyond the memory cost a price.

    Only the bytes held at the end count, so the bounds hold for every plan that fits.
    """
    last = [(*option.peaks, *option.top) for option in problem.units[-1]]
    room = memory - min(max((peak.extra for peak in peaks), default=0) for peaks in last)
    low, high = 0.0, 0.0
    for steps in problem.steps:
        for own in steps.values():
            for step in own:
                for other in own:
                    if other.held > step.held and other.cost < step.cost:
                        high = max(high, (step.cost - other.cost) / (other.held - step.held))
    for _ in range(NUM_HALVINGS):  # the price at which the memory is just used up
        price = (low + high) / 2
        if _priced(problem, price)[1] > room:
            low = price
        else:
            high = price
    prices = [high, 0.95 * high, 1.05 * high]
    least = [_priced(problem, price)[0] for price in prices]
    return [
        {
            state: [
                (costs[index + 1][state] - price * room, price)
                for costs, price in zip(least, prices, strict=True)
            ]
            for state in least[0][index + 1]
        }
        for index in range(len(problem.steps))
    ]


def _priced(problem: Problem, price: float) -> tuple[list[dict[State, float]], int]:
    """Return the least sum of cost and priced bytes above every state, and the bytes from below."""
    values: dict[State, tuple[float, int]] = {}
    for own in problem.steps[-1].values():
        values |= {step.state: (0.0, 0) for step in own}
    least = [{state: value for state, (value, _) in values.items()}]
    for steps in reversed(problem.steps):
        values = {
            state: min(
                (
                    cost + price * held + values[after][0],
                    held + values[after][1],
                )
                for _, after, cost, held, _ in own
            )
            for state, own in steps.items()
        }
        least.append({state: value for state, (value, _) in values.items()})
    ((_, held),) = values.values()
    return least[::-1], held
