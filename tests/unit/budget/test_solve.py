"""The solver equals exhaustive search, on tables that Hypothesis draws."""

from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redivider.budget import solve as solver
from redivider.budget.bounds import find_rests, make_bounds
from redivider.budget.problem import Option, Peak, Problem, find_least, trace
from redivider.budget.solve import solve

MOST_PLANS = 5000


def peak_of(problem: Problem, options: tuple[Option, ...]) -> int:
    """Return the largest sum of held and extra bytes, tensor by tensor."""
    worst = 0
    for i, option in enumerate(options):
        private, shared = 0, set()
        for j in range(i + 1):
            private += options[j].held
            shared |= {*options[j].keeps}
            reversed_above = j + 1 < len(options) and options[j + 1].pair
            if options[j].pair and not reversed_above:
                shared |= {*options[j].pair}
        is_top = option.pair and not (i + 1 < len(options) and options[i + 1].pair)
        for alive, extra in option.top if is_top else option.peaks:
            there = shared | {*alive}
            worst = max(worst, private + extra + sum(problem.sizes[key] for key in there))
        worst = max(worst, private + sum(problem.sizes[key] for key in shared))
    return worst


def cost_of(options) -> float:
    return sum(option.cost for option in options)


few = st.integers(0, 9)


@st.composite
def problems(draw, max_units: int = 12):
    """Draw rows of couplings and junctions, in which neighbours share the tensors between them."""
    sizes: dict[Any, int] = {}
    units: list[tuple[Option, ...]] = []
    num_plans = 1
    for i in range(draw(st.integers(1, max_units))):
        # Tensor (i, 0) enters unit i together with (i, 1); streams of couplings pass through.
        sizes |= {(i, 0): draw(few), (i + 1, 0): draw(few), (i, 1): draw(few)}
        near = [key for key in sizes if key[0] >= i - 1]
        keys = st.lists(st.sampled_from(near), max_size=2, unique=True).map(tuple)
        peaks = st.lists(st.builds(Peak, keys, few), min_size=1, max_size=2).map(tuple)
        options = [Option("store", 0, draw(few), draw(keys), draw(peaks))]
        if num_plans * 2 <= MOST_PLANS and draw(st.booleans()):
            cost, held = draw(st.integers(1, 5)), draw(few)
            options.append(Option("checkpoint", cost, held, draw(keys), draw(peaks)))
        for number in range(draw(st.integers(0, 3))):  # between store and checkpoint
            if num_plans * (len(options) + 1) <= MOST_PLANS:
                cost, held = draw(st.integers(1, 5)) / 2, draw(few)
                options.append(Option(f"part {number}", cost, held, draw(keys), draw(peaks)))
        if num_plans * (len(options) + 1) <= MOST_PLANS and draw(st.booleans()):
            pair = tuple(draw(st.permutations(near))[:2])
            cost = draw(st.integers(1, 5))
            options.append(Option("reverse", cost, 0, (), draw(peaks), pair, draw(peaks)))
        num_plans *= len(options)
        units.append(tuple(options))
    return Problem(tuple(units), sizes)


def check(problem: Problem, data) -> None:
    plans = list(product(*problem.units))
    peaks = [peak_of(problem, plan) for plan in plans]
    memory = data.draw(st.integers(min(peaks) - 1, max(peaks)))
    fitting = [cost_of(plan) for plan, peak in zip(plans, peaks, strict=True) if peak <= memory]
    choices = solve(problem, memory)
    if not fitting:
        assert choices is None
        return
    assert choices is not None
    plan = tuple(own[choice] for own, choice in zip(problem.units, choices, strict=True))
    assert peak_of(problem, plan) <= memory
    assert cost_of(plan) == min(fitting)


@given(problems(6), st.data())
def test_it_equals_exhaustive_search(problem, data):
    check(problem, data)


@settings(max_examples=75)
@given(problems(6), st.data(), st.sampled_from([1, 4, 8]), st.sampled_from([1, 3, 512]))
def test_it_is_exact_with_any_blocks_and_few_partial_plans(problem, data, num_steps, width):
    """Small problems are one block else, and have no front that is thinned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "NUM_STEPS", num_steps)
        patch.setattr(solver, "WIDTHS", (1, width, 4096))
        patch.setattr(solver, "NUM_MANY", width)
        check(problem, data)


@given(problems(6), st.integers(0, 80), st.sampled_from([1, 8]), st.sampled_from([0, inf]))
def test_a_plan_is_found_where_nearly_all_partial_plans_are_dropped(problem, memory, steps, first):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "NUM_STEPS", steps)
        patch.setattr(solver, "WIDTHS", (1, 1, 1))
        patch.setattr(solver, "NUM_MANY", 0)
        patch.setattr(solver, "NUM_MOST", 0)
        if first:
            patch.setattr(solver, "_estimate", lambda *args: first)
        choices = solve(problem, memory)
    peaks = [peak_of(problem, plan) for plan in product(*problem.units)]
    assert (choices is None) == (memory < min(peaks))
    if choices is not None:
        plan = tuple(own[choice] for own, choice in zip(problem.units, choices, strict=True))
        assert peak_of(problem, plan) <= memory


@given(problems(6), st.data(), st.sampled_from([1, 8]))
def test_it_is_exact_without_a_first_plan(problem, data, num_steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "NUM_STEPS", num_steps)
        patch.setattr(solver, "_estimate", lambda *args: inf)
        check(problem, data)


@given(problems(6), st.integers(0, 80))
def test_the_first_search_finds_a_plan_that_fits(problem, memory):
    plans = [plan for plan in product(*problem.units) if peak_of(problem, plan) <= memory]
    if plans:
        cost = solver._estimate(problem, memory, make_bounds(problem, memory))
        assert any(cost == pytest.approx(cost_of(plan), abs=1e-6) for plan in plans)


@given(problems(6), st.floats(0, 4))
def test_bounds_are_not_above_the_cost_of_any_plan(problem, price):
    (rest,) = find_rests(problem, price)[0].values()
    plans = [(cost_of(plan), peak_of(problem, plan)) for plan in product(*problem.units)]
    assert rest.value <= min(cost + price * peak for cost, peak in plans) + 1e-9
    assert (rest.cost, rest.peak) in plans


@st.composite
def rows_of_kinds(draw):
    """Draw rows of a few kinds of units, with many plans of equal costs or bytes."""
    costs, bytes_ = st.sampled_from([0, 1, 1, 2, 3]), st.integers(0, 4)
    peaks = st.builds(lambda extra: (Peak((), extra),), bytes_)
    option = st.builds(lambda c, h, p: Option("", c, h, (), p), costs, bytes_, peaks)
    kinds = draw(st.lists(st.lists(option, min_size=1, max_size=3), min_size=1, max_size=3))
    units = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    return Problem(units, {})


@settings(max_examples=100)
@given(rows_of_kinds(), st.data(), st.sampled_from([1, 8]), st.sampled_from([1, 512]))
def test_it_is_exact_for_units_of_few_kinds(problem, data, num_steps, width):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "NUM_STEPS", num_steps)
        patch.setattr(solver, "WIDTHS", (1, width, 4096))
        patch.setattr(solver, "NUM_MANY", width)
        check(problem, data)


@pytest.mark.slow
@settings(max_examples=12)
@given(problems(), st.data())
def test_it_equals_exhaustive_search_of_twelve_units(problem, data):
    check(problem, data)


@given(problems(6))
def test_the_least_memory_is_that_of_the_best_plan(problem):
    least = find_least(problem)
    assert least == min(peak_of(problem, plan) for plan in product(*problem.units))
    assert solve(problem, least) is not None
    assert solve(problem, least - 1) is None


@given(problems(6), st.data())
def test_a_trace_ends_in_the_peak(problem, data):
    choices = [data.draw(st.integers(0, len(own) - 1)) for own in problem.units]
    rows = trace(problem, choices)
    plan = tuple(own[choice] for own, choice in zip(problem.units, choices, strict=True))
    assert max(peak for _, peak in rows) == peak_of(problem, plan)


def test_it_stores_near_the_loss_and_reverses_below():
    """Of equal couplings, with room for three graphs, the top three are stored."""
    stream, graph = 1, 10
    sizes: dict[Any, int] = {i: stream for i in range(-2, 8)} | {-1: 2 * stream}
    units = [
        (
            Option("store", 0, graph, (i - 1,), (Peak((), 2 * stream),)),
            Option("checkpoint", 1, 0, (i - 1,), (Peak((), graph + 2 * stream),)),
            Option(
                "reverse",
                1,
                0,
                (),
                (Peak((), graph + 4 * stream),),
                (i, i - 1),
                (Peak((), graph + 3 * stream),),
            ),
        )
        for i in range(8)
    ]
    choices = solve(Problem(units, sizes), 3 * (graph + stream) + 3 * stream)
    assert choices == [2] * 5 + [0] * 3


@pytest.mark.parametrize("slow", ["small", "large"])
def test_by_bytes_a_plan_takes_least_whatever_units_cost(slow):
    """Where another unit needs most, two options of a unit may fit, of which one takes less."""
    sizes: dict[Any, int] = {}
    costs = {"small": 1.0, "large": 1.0} | {slow: 2.0}
    choices = (
        Option("small", costs["small"], 1, (), (Peak((), 1),)),
        Option("large", costs["large"], 3, (), (Peak((), 1),)),
    )
    largest = Option("store", 0, 0, (), (Peak((), 9),))
    problem = Problem(((largest,), choices), sizes)
    assert solve(problem, find_least(problem)) == [0, 0 if slow == "large" else 1]
    assert solve(problem.by_bytes(), find_least(problem)) == [0, 0]


@given(problems(6), st.data())
def test_by_bytes_no_plan_that_fits_takes_less(problem, data):
    """Bytes may be negative, where something that was there is freed."""
    units = list(problem.units)
    place = data.draw(st.integers(0, len(units) - 1))
    freed = data.draw(st.integers(0, 30))
    units[place] = tuple(replace(option, held=option.held - freed) for option in units[place])
    problem = replace(problem, units=units)
    least = find_least(problem)
    sizes = problem.by_bytes()
    assert all(option.cost >= 0 for own in sizes.units for option in own)
    choices = solve(sizes, least)
    costs = [
        cost_of(own[choice] for own, choice in zip(sizes.units, plan, strict=True))
        for plan in product(*(range(len(own)) for own in units))
        if plan == choices or max(peak for _, peak in trace(problem, plan)) <= least
    ]
    assert choices is not None
    assert cost_of(own[c] for own, c in zip(sizes.units, choices, strict=True)) == min(costs)


@given(problems(3))
def test_a_table_is_finite_without_a_bound(problem):
    """Its numbers are multiplied by zero in all states but one."""
    rests = {state: [rest] for state, rest in find_rests(problem, 1.0)[1].items()}
    rows, _ = solver._tabulate(problem.steps[0], rests, 1.0, 10, inf)
    assert rows.isfinite().all()
