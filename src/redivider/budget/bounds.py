"""Lower bounds on what the units above a state cost, and plans for them, by Lagrange multipliers.

Bytes beyond the memory cost a price. A plan that fits has none, so the bounds hold for it.
"""

from itertools import product
from math import inf
from typing import NamedTuple

from redivider.budget.problem import Problem, State, Step

NUM_PRICES = 6  # that are tried
PRICES = (1.0, 0.0, 0.97, 1.03)  # of bounds, in units of that at which the memory is used up


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


def make_bounds(problem: Problem, memory: int) -> Bounds:
    """Return bounds for a memory, at prices around that at which it is used up."""
    price, fitting = _find_price(problem, memory)
    prices = [*(factor * price for factor in PRICES), fitting]
    tables = [find_rests(problem, price) for price in prices]
    rests = [
        {state: [own[state] for own in row] for state in row[0]}
        for row in zip(*tables, strict=True)
    ]
    total = sum(max(option.cost for option in options) for options in problem.units)
    return Bounds(prices, rests, 1e-9 * total + 1e-12 * price * memory)


def follow(problem: Problem, bounds: Bounds, index: int, state: State, number: int) -> list[int]:
    """Return the choices of a plan for the units above a state, and of the end."""
    plan, price = list[int](), bounds.prices[number]
    for steps, rests, above in zip(
        problem.steps[index:], bounds.rests[index:], bounds.rests[index + 1 :], strict=False
    ):
        wanted = rests[state][number]
        step = next(s for s in steps[state] if _is_below(s, above[s.state][number], wanted, price))
        plan, state = [*plan, *step.numbers], step.state
    return plan


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
    (rest,) = find_rests(problem, price)[0].values()
    return rest.cost, rest.peak


def find_rests(problem: Problem, price: float) -> list[dict[State, Rest]]:
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
    """Return whether a step and the plan above it are a longer plan of `find_rests`."""
    value = step.cost + max(price * step.need, price * step.held + rest.value)
    return (value, max(step.need, step.held + rest.peak), step.cost + rest.cost) == longer
