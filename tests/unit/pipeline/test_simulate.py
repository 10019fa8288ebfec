"""The simulator against orders that are written out, closed formulas and the schedule itself."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import redivider as rd
from redivider.pipeline.diagnostics.timeline import planned_spans
from redivider.pipeline.methods import METHODS
from redivider.pipeline.schedule import KINDS, Schedule, resolve_latency
from redivider.pipeline.simulate import ASYNCHRONOUS, LATENCIES

Step = tuple[str, int, int]
Spans = dict[Step, tuple[float, float]]
latencies = st.sampled_from([0.5, 1, 1.5, 2, 4])
times = st.integers(1, 9)
replicas = st.integers(1, 2)


def shorter_replays():
    """Return a context in which settings with jitter are replayed for fewer ticks."""
    return patch.multiple("redivider.pipeline.simulate", NUM_REPLAYED=4_000, MIN_TICKS=40)


def execute(orders: Sequence[Sequence[Step]], setting: dict[str, Any], last: int) -> Spans:
    """Run the actions of every device in their order, each as soon as its message has arrived.

    A message of a gradient leaves at the end of the step "B"; "W" are gradients of weights.
    """
    spans: Spans = {}
    free, places = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        is_stuck = True
        for device, order in enumerate(orders):
            while places[device] < len(order):
                kind, stage, n = step = order[places[device]]
                source = (kind, stage + (1 if kind == "B" else -1), n)
                is_first = kind == "W" or (stage == last if kind == "B" else stage == 0)
                if not is_first and source not in spans:
                    break
                arrival = 0.0
                if not is_first:
                    arrival = spans[source][1] + setting["hop"][min(stage, source[1])]
                start = max(free[device], arrival)
                free[device] = start + setting[kind][stage]
                spans[step] = start, free[device]
                places[device] += 1
                is_stuck = False
        assert not is_stuck, "the orders are in a deadlock"
    return spans


def order_of_schedule(schedule: Schedule, num: int) -> list[list[Step]]:
    """Return the actions of every stage, in the order in which a runner finds them."""
    orders: list[list[Step]] = [[] for _ in range(schedule.num_stages)]
    for tick in range(schedule.num_ticks(num)):
        for kind, stage, n in schedule.actions(tick, num):
            orders[stage].append((kind, stage, n))
            if kind == "B" and schedule.is_tight(stage):
                orders[stage].append(("W", stage, n))
    return orders


def order_of_1f1b(stages: int, num: int) -> list[list[Step]]:
    orders = []
    for j in range(stages):
        ahead = min(stages - 1 - j, num)
        order: list[Step] = [("F", j, n) for n in range(ahead)]
        for n in range(num):
            if ahead + n < num:
                order.append(("F", j, ahead + n))
            order.append(("B", j, n))
        orders.append(order)
    return orders


def order_of_gpipe(stages: int, num: int) -> list[list[Step]]:
    return [[(kind, j, n) for kind in "FB" for n in range(num)] for j in range(stages)]


def order_of_interleaved(devices: int, num: int) -> list[list[Step]]:
    """Return Megatron's order: groups of as many micro-batches as devices, chunk by chunk."""
    chunks = 2
    steps = [
        (c, g * devices + n) for g in range(num // devices) for c in (0, 1) for n in range(devices)
    ]
    orders = []
    for j in range(devices):
        forwards: list[Step] = [("F", c * devices + j, n) for c, n in steps]
        backwards: list[Step] = [("B", (chunks - 1 - c) * devices + j, n) for c, n in steps]
        ahead = min(2 * (devices - 1 - j) + (chunks - 1) * devices, len(steps))
        order = forwards[:ahead]
        for i, backward in enumerate(backwards):
            order += [*forwards[ahead + i : ahead + i + 1], backward]
        orders.append(order)
    return orders


def order_of_zero_bubble(stages: int, num: int, doubled: int) -> list[list[Step]]:
    """Return ZB-H1, or H2 (doubled 2): no stage holds more than J or 2 J - 1 micro-batches."""
    orders = []
    for j in range(stages):
        ahead, late = doubled * (stages - 1 - j), doubled * j
        order: list[Step] = [("F", j, n) for n in range(min(ahead, num))]
        for n in range(num):
            order += [("F", j, ahead + n)] if ahead + n < num else []
            order += [("B", j, n)]
            order += [("W", j, n - late)] if n >= late else []
        order += [("W", j, n) for n in range(max(0, num - late), num)]
        orders.append(order)
    return orders


def in_order(timeline: Any) -> Spans:
    return {tuple(action): span for action, span in timeline.spans.items()}


@st.composite
def costs(draw: Any, stages: int) -> dict[str, Any]:
    return {
        "forward": [draw(times) for _ in range(stages)],
        "backward": [draw(times) for _ in range(stages)],
        "hop": [draw(st.integers(0, 5)) for _ in range(stages - 1)],
    }


@given(st.data())
def test_a_simulated_run_is_that_of_the_schedule(data):
    stages, num = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    drawn_times = data.draw(costs(stages))
    latency = data.draw(st.lists(latencies, min_size=stages - 1, max_size=stages - 1))
    method = data.draw(st.sampled_from(["petra", "delayed-graph"]))
    schedule = Schedule(stages, tuple(latency))
    forward, backward = drawn_times["forward"], drawn_times["backward"]
    weights = [0.0] * stages
    for j in range(stages):
        if schedule.is_tight(j):
            again = 0 if method == "delayed-graph" else forward[j]
            weights[j] = max(backward[j] - again, 0) / 2
    first = [b - w for b, w in zip(backward, weights, strict=True)]
    setting = {"F": forward, "B": first, "W": weights, "hop": drawn_times["hop"]}
    expected = execute(order_of_schedule(schedule, num), setting, stages - 1)
    simulated = rd.simulate(method, stages, latency=latency, **drawn_times).timeline(num)
    empty = {step for step in expected if step[0] == "W" and not weights[step[1]]}
    assert in_order(simulated) == {k: span for k, span in expected.items() if k not in empty}


@given(st.data())
def test_no_message_waits_for_its_request(data):
    """A process requests it when it begins the tick `max_ticks` before the one of its sending."""
    stages = data.draw(st.integers(2, 4))
    drawn_times = data.draw(costs(stages))
    links = st.lists(latencies, min_size=stages - 1, max_size=stages - 1)
    latency = data.draw(latencies | links)
    schedule = Schedule(stages, resolve_latency(latency, stages))
    num = 3 * schedule.num_in_flight + 9
    with shorter_replays():
        result = rd.simulate(stages=stages, latency=latency, rendezvous=True, **drawn_times)
    spans = in_order(result.timeline(num))
    lags: dict[str, list[int]] = {k: [schedule.lag(k, j) for j in range(stages)] for k in KINDS}
    lags["W"] = lags["B"]
    ends: dict[tuple[int, int], float] = {}  # of the ticks of a stage
    for (kind, stage, n), (_, end) in spans.items():
        place = stage, n + lags[kind][stage]
        ends[place] = max(end, ends.get(place, 0.0))
    for kind, stage, n in spans:
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < stages:
            continue
        sent = n + lags[kind][source]
        begin = sent - schedule.max_ticks
        if schedule.num_in_flight < begin and sent < num:  # neither filling nor draining
            arrival = ends[stage, begin - 1] + drawn_times["hop"][min(stage, source)]
            assert arrival <= spans[kind, source, n][1] + 1e-9


def test_a_synchronous_method_requests_when_it_needs():
    """Every action above and below waits two hops: one for the request, one for the message."""
    result = rd.simulate("gpipe", 2, 3, forward=1, backward=1, hop=5, rendezvous=True)
    spans = in_order(result.timeline())
    assert [spans["F", 1, n][0] for n in range(3)] == [10, 21, 32]
    assert [spans["B", 0, n][0] for n in range(3)] == [39, 50, 61]


@settings(deadline=None)
@given(st.data())
def test_the_period_is_that_of_a_long_run(data):
    stages = data.draw(st.integers(1, 4))
    drawn_times = data.draw(costs(stages))
    latency = data.draw(st.lists(latencies, min_size=stages - 1, max_size=stages - 1))
    predicted = rd.simulate(stages=stages, latency=latency, **drawn_times)
    num = 20 * stages
    spans = in_order(predicted.timeline(2 * num + predicted.delay[0]))  # without the end of a run
    elapsed = spans["B", 0, 2 * num - 1][1] - spans["B", 0, num - 1][1]
    longest = sum(map(sum, drawn_times.values())) + max(drawn_times["hop"], default=0)
    # A run is at most one round trip away from its period.
    assert elapsed == pytest.approx(num / predicted.throughput, abs=2 * longest)


@pytest.mark.parametrize("recompute", [False, True])
@given(data=st.data())
def test_synchronous_orders_are_as_published(recompute, data):
    method = data.draw(st.sampled_from(list(LATENCIES)))
    stages, num = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    num = num * stages if method == "interleaved" else num
    drawn_times = data.draw(costs(stages))
    forward, backward, hop = drawn_times.values()
    again = forward if recompute else [0] * stages
    setting = {"F": forward, "hop": hop, "W": [0.0] * stages}
    setting["B"] = [b + f for b, f in zip(backward, again, strict=True)]
    last = stages - 1
    if method.startswith("zero-bubble"):
        setting["W"] = [b / 2 for b in backward]
        setting["B"] = [b / 2 + f for b, f in zip(backward, again, strict=True)]
        orders = order_of_zero_bubble(stages, num, 1 + method.endswith("h2"))
    elif method == "interleaved":
        halves = {kind: [time / 2 for time in setting[kind]] * 2 for kind in "FB"}
        setting = {**halves, "hop": [*hop, max(hop, default=0), *hop]}
        orders, last = order_of_interleaved(stages, num), 2 * stages - 1
    else:
        orders = (order_of_1f1b if method == "1f1b" else order_of_gpipe)(stages, num)
    expected = execute(orders, setting, last)
    result = rd.simulate(method, stages, num, recompute=recompute, **drawn_times)
    assert in_order(result.timeline()) == expected
    ends = [[expected[step] for step in order] for order in orders]
    assert result.throughput == pytest.approx(
        num / max(spans[-1][1] - spans[0][0] for spans in ends)
    )


@given(st.integers(1, 8), st.integers(1, 20), times, times, st.booleans())
def test_idle_shares_are_the_closed_formulas(stages, num, forward, backward, recompute):
    def idle(method: str) -> float:
        return rd.simulate(
            method, stages, num, forward=forward, backward=backward, recompute=recompute
        ).idle

    ahead = stages - 1
    assert idle("gpipe") == pytest.approx(ahead / (num + ahead))
    assert idle("1f1b") == pytest.approx(ahead / (num + ahead))
    num *= stages
    assert idle("interleaved") == pytest.approx(ahead / (2 * num + ahead))
    for method in ASYNCHRONOUS:
        steady = rd.simulate(method, stages, forward=forward, backward=backward)
        assert steady.idle == pytest.approx(0, abs=1e-12)
        assert steady.throughput == pytest.approx(1 / (forward + backward))


@given(st.integers(2, 6), st.sampled_from([0.5, 1, 2, 4]), times, times)
def test_ours_never_idle_while_hops_are_short_enough(stages, latency, forward, backward):
    """At latency 0.5 a hop hides behind half of the gradients of weights, else behind slots."""
    hidden = backward / 4 if latency == 0.5 else (2 * latency - 1) * (forward + backward) / 2
    for hop in (0.0, hidden / 2, hidden):
        arguments = {"forward": forward, "backward": backward, "latency": latency, "hop": hop}
        result = rd.simulate("delayed-graph", stages, **arguments)
        assert result.idle == pytest.approx(0, abs=1e-12)
    arguments["hop"] = hidden + 0.01
    assert rd.simulate("delayed-graph", stages, **arguments).idle > 0


@given(st.integers(2, 8), st.integers(0, 30), times, times, st.booleans())
def test_zero_bubble_idles_as_published(stages, more, forward, backward, recompute):
    """ZB-H1 idles (J - 1) (F + B - W) from k = J on, and H2 (J - 1) (F + B - 2 W) from 2 J on.

    That is for forwards as long as gradients of weights, at least. With shorter ones stage 0 waits
    (J - 1) B for its first gradient, whatever the order.
    """
    weights = backward / 2
    first = backward - weights + recompute * forward
    h1 = max(forward + first - weights, first)
    gaps = {"zero-bubble": h1, "zero-bubble-h2": abs(h1 - weights)}
    for name, gap in gaps.items():
        num = stages * (1 if name == "zero-bubble" else 2) + more
        arguments = {"forward": forward, "backward": backward, "recompute": recompute}
        result = rd.simulate(name, stages, num, **arguments)
        if name == "zero-bubble" or forward >= weights:
            whole = num * (forward + first + weights)
            gap *= stages - 1
            assert result.idle == pytest.approx(gap / (whole + gap), abs=1e-12)


@given(st.integers(1, 7), latencies, st.integers(1, 20))
def test_delay_and_memory_are_those_of_the_schedule(stages, latency, num):
    result = rd.simulate(stages=stages, latency=latency, accumulate=num)
    schedule = Schedule(stages, latency)
    assert result.delay == [schedule.delay(j) for j in range(stages)]
    assert result.held == [schedule.num_kept(j) for j in range(stages)]
    assert result.late == schedule.delay(0) / num == 2 * latency * (stages - 1) / num


@given(st.data())
def test_what_is_held_is_counted_in_the_timeline(data):
    """Micro-batches of a device after a forward and before the end of their last gradient."""
    method = data.draw(st.sampled_from(list(LATENCIES)))
    stages, num = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    num = num * stages if method == "interleaved" else num
    result = rd.simulate(method, stages, num)
    last = "W" if method.startswith("zero-bubble") else "B"
    part = 0.5 if method == "interleaved" else 1.0
    for j in range(stages):
        own = [(a, span) for a, span in result.timeline().spans.items() if a.stage % stages == j]
        held = most = 0.0
        for action, _ in sorted(own, key=lambda pair: pair[1]):
            if action.kind == "F":
                held += part
                most = max(most, held)
            elif action.kind == last:
                held -= part
        assert most == result.held[j] and held == 0


def test_unit_times_give_the_picture_of_the_schedule():
    picture = """
stage 0  F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
stage 1     F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
stage 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5""".strip()
    result = rd.simulate(stages=3, backward=1, latency=0.5)
    assert str(result.timeline(6)).rstrip() == picture


@given(st.integers(1, 6), st.sampled_from([0.5, 1, 1.5, 2]), st.integers(1, 20))
def test_unit_times_run_in_the_slots_of_the_schedule(stages, latency, num):
    """Only forwards that fill the pipeline come earlier: nothing makes them wait."""
    schedule = Schedule(stages, latency)
    spans = rd.simulate(stages=stages, backward=1, latency=latency).timeline(num).spans
    assert len(spans) == 2 * stages * num
    for (kind, stage, n), (start, _) in spans.items():
        slot = 2 * n + schedule.slot(kind, stage) + (kind == "B" and stage == stages - 1)
        if latency == 0.5 and (kind == "B" or n > schedule.delay(stage)):
            assert start == slot
        assert start <= slot


@given(st.integers(1, 6), st.integers(1, 20))
def test_half_ticks_are_as_planned(stages, num):
    simulated = rd.simulate(stages=stages, forward=1, backward=1, latency=0.5).timeline(num)
    planned = planned_spans(stages, latency=0.5, num_microbatches=num, backward=1)
    assert simulated.spans == planned


@given(st.integers(2, 6), st.sampled_from([0.5, 1, 1.5, 2, 4]))
def test_latency_hides_hops(stages, latency):
    """Throughput is full as long as c <= (h - 1) T / 2; at latency 0.5 early sends hide T / 4.

    That a quarter is hidden takes gradients of weights of half of a backward without recomputation.
    """
    tick, slots = 4.0, 2 * latency
    method = "delayed-graph" if latency == 0.5 else "petra"
    hidden = tick / 4 if latency == 0.5 else (slots - 1) * tick / 2
    forward = 0.0 if latency == 0.5 else 1.0

    def period(hop: float) -> float:
        backward = tick - forward
        return (
            1
            / rd.simulate(
                method, stages, forward=forward, backward=backward, latency=latency, hop=hop
            ).throughput
        )

    assert period(hidden) == pytest.approx(tick)
    assert period(hidden + 0.1) > tick


def test_a_hop_costs_what_delay_and_tick_leave():
    """Period = max over ranges of (sum of T + 2 sum of c) / (sum of h + 1)."""
    stages, forward, backward, hop = 4, [1, 2, 1, 3], [2, 3, 4, 1], [7, 30, 2]
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    expected = max(
        (sum(whole[a : b + 1]) + 2 * sum(hop[a:b])) / (2 * (b - a) + 1)
        for a in range(stages)
        for b in range(a, stages)
    )
    result = rd.simulate(stages=stages, forward=forward, backward=backward, hop=hop)
    assert 1 / result.throughput == pytest.approx(expected)
    assert result.idle == pytest.approx(1 - sum(whole) / 4 / expected)


@pytest.mark.slow
def test_jitter_costs_more_with_less_latency():
    """Shares of full throughput of eight stages at 5, 10 and 20 %."""
    expected = {1: (0.997, 0.989, 0.963), 2: (1.0, 0.998, 0.993)}
    for latency, shares in expected.items():
        for jitter, share in zip((0.05, 0.1, 0.2), shares, strict=True):
            result = rd.simulate(latency=latency, backward=3, jitter=jitter)
            assert 4 * result.throughput == pytest.approx(share, abs=0.01)
    early = rd.simulate(latency=0.5, backward=3, jitter=0.1)
    assert 0.95 < 4 * early.throughput < 4 * rd.simulate(backward=3, jitter=0.1).throughput


@given(st.data())
def test_nothing_is_faster_than_the_slowest_stage(data):
    """Neither where others run ahead of it for longer than the replay lasts, nor by chance."""
    stages = data.draw(st.integers(1, 24))
    drawn_times = data.draw(costs(stages))
    arguments = {"jitter": data.draw(st.sampled_from([0.0, 0.02, 1.0]))}
    arguments |= {"latency": data.draw(latencies | st.just(16)), "replicas": data.draw(replicas)}
    with patch.multiple("redivider.pipeline.simulate", NUM_REPLAYED=500, MIN_TICKS=8):
        result = rd.simulate(stages=stages, **drawn_times, **arguments)
    whole = [f + b for f, b in zip(drawn_times["forward"], drawn_times["backward"], strict=True)]
    period = arguments["replicas"] / result.throughput
    assert period >= max(whole) * (1 - 1e-9)
    assert result.idle == pytest.approx(1 - sum(whole) / stages / period)


def test_a_slow_stage_of_many_is_the_bottleneck():
    forward, backward = [1.0] * 63 + [1.1], [2.0] * 63 + [2.2]
    with shorter_replays():
        result = rd.simulate(stages=64, forward=forward, backward=backward, latency=8, jitter=0.02)
    assert 0.99 / 3.3 <= result.throughput <= 1.000001 / 3.3
    assert result.idle >= 1 - (63 * 3 + 3.3) / 64 / 3.3 - 1e-9


@pytest.mark.slow
def test_replicas_multiply_and_wait_for_each_other():
    one, four = (rd.simulate(replicas=replicas) for replicas in (1, 4))
    assert four.throughput == 4 * one.throughput and four.idle == one.idle
    for method in ("petra", "1f1b"):
        often, seldom = (
            rd.simulate(method, 4, accumulate, jitter=0.3, replicas=4).throughput
            / rd.simulate(method, 4, accumulate, jitter=0.3).throughput
            for accumulate in (4, 64)
        )
        assert often < seldom < 4.0


settings_of_all_methods = st.fixed_dictionaries(
    {
        "method": st.sampled_from([*ASYNCHRONOUS, *LATENCIES]),
        "stages": st.integers(1, 6),
        "accumulate": st.integers(1, 12),
        "jitter": st.sampled_from([0.0, 0.0, 0.0, 0.1, 1.0]),
        "rendezvous": st.sampled_from([False, False, True]),
        "replicas": st.integers(1, 2),
        "recompute": st.booleans(),
    }
)
NUM_SETTINGS = int(os.environ.get("REDIVIDER_SETTINGS", "25"))


def run_random_setting(data: st.DataObject) -> None:
    arguments: dict[str, Any] = dict(data.draw(settings_of_all_methods))
    stages = arguments["stages"]
    number = st.just(0.0) | st.floats(1e-6, 1e3)
    own_times = number | st.lists(number, min_size=stages, max_size=stages)
    hop = st.floats(0, 1e3)
    hops = hop | st.lists(hop, min_size=stages - 1, max_size=stages - 1)
    latency = latencies | st.lists(latencies, min_size=stages - 1, max_size=stages - 1)
    drawn = {"forward": own_times, "backward": own_times, "hop": hops, "latency": latency}
    arguments |= {name: data.draw(values) for name, values in drawn.items()}
    if arguments["method"] == "interleaved":
        arguments["accumulate"] *= stages
    if arguments["method"] in ASYNCHRONOUS:
        arguments["recompute"] = False
    whole = [0.0] * stages
    for name, times in (("forward", 1 + arguments["recompute"]), ("backward", 1)):
        own = arguments[name] if isinstance(arguments[name], list) else [arguments[name]] * stages
        whole = [total + times * time for total, time in zip(whole, own, strict=True)]
    with patch.multiple("redivider.pipeline.simulate", NUM_REPLAYED=500, MIN_TICKS=8):
        if not min(whole):
            with pytest.raises(ValueError, match="must take time"):
                rd.simulate(**arguments)
            return
        result = rd.simulate(**arguments)
    assert 0.0 <= result.idle < 1.0
    assert 0.0 < result.throughput < float("inf")
    if arguments["method"] in ASYNCHRONOUS or not arguments["jitter"]:
        period = arguments["replicas"] / result.throughput
        assert period >= max(whole) * (1 - 1e-9)
        assert result.idle == pytest.approx(1 - sum(whole) / stages / period, abs=1e-9)
    assert len(result.delay) == len(result.held) == stages
    assert min(result.delay) >= 0 and min(result.held) >= 0


@pytest.mark.timeout(60 + NUM_SETTINGS)
@settings(max_examples=NUM_SETTINGS, deadline=None)
@given(st.data())
def test_random_settings_neither_crash_nor_idle_for_less_than_nothing(data):
    run_random_setting(data)


@pytest.mark.slow
def test_a_trace_has_every_action(tmp_path):
    timeline = rd.simulate("zero-bubble", 3, 4).timeline()
    timeline.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == 3 + 3 * 3 * 4
    timeline.plot(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 0


def test_names_are_those_of_the_methods():
    assert set(ASYNCHRONOUS) == set(METHODS)
    assert set(KINDS) == {"F", "B"}


def test_mistakes_are_refused():
    for arguments, text in (
        ({"method": "1f1"}, "did you mean"),
        ({"stages": 0}, "stages must be a whole number"),
        ({"forward": [1.0, 2.0]}, "one for every stage: 8"),
        ({"hop": [1.0] * 8}, "one for every link: 7"),
        ({"hop": -1.0}, "not negative"),
        ({"hop": [1.0] * 6 + [float("nan")]}, "not negative"),
        ({"forward": 1e308}, "below 1e"),
        ({"jitter": -0.1}, "jitter must be"),
        ({"jitter": 1.1}, "jitter must be"),
        ({"jitter": "a"}, "jitter must be"),
        ({"stages": None}, "stages must be a whole number"),
        ({"stages": 4.0}, "stages must be a whole number"),
        ({"stages": float("inf")}, "stages must be a whole number"),
        ({"accumulate": True}, "accumulate must be a whole number"),
        ({"latency": 0.3}, "multiple of 0.5"),
        ({"forward": 0.0, "backward": 0.0}, "of stage 0 must take time"),
        ({"stages": 2, "forward": [1.0, 0.0], "backward": 0.0}, "of stage 1 must take time"),
        ({"recompute": True}, "leave recompute out"),
        ({"method": "interleaved", "accumulate": 9}, "multiple of 8"),
    ):
        with pytest.raises(ValueError, match=text):
            rd.simulate(**arguments)
    wrong: Any
    for wrong in (None, "a", [1.0, None]):
        with pytest.raises(TypeError, match="forward must be a number, or a list with one for"):
            rd.simulate(stages=2, forward=wrong)
    for wrong in (-3, 0, 2.0):
        with pytest.raises(ValueError, match="num_microbatches must be a whole number"):
            rd.simulate().timeline(wrong)
    with pytest.raises(ValueError, match="an update has 6 micro-batches, got 7"):
        rd.simulate("1f1b", 3, 6).timeline(7)


def test_a_stage_may_spend_all_its_time_in_one_direction():
    result = rd.simulate(stages=2, forward=[0.0, 1.0], backward=[1.0, 0.0])
    assert result.throughput == 1.0 and result.idle == 0.0


@pytest.mark.parametrize("method", LATENCIES)
def test_a_timeline_begins_like_the_whole_update(method):
    result = rd.simulate(method, 3, 6)
    whole, first = result.timeline().spans, result.timeline(4).spans
    assert first == {action: span for action, span in whole.items() if action.microbatch < 4}


def test_a_simulation_prints_a_table():
    result = rd.simulate(stages=4, accumulate=8)
    assert repr(result) == ("Simulation('petra', stages=4, throughput=0.3333, idle=0, late=0.75)")
    table = dict(line.split(maxsplit=1) for line in str(result).splitlines())
    assert table["idle"] == "0.0%" and table["late"].startswith("0.75 updates")


def test_a_timeline_of_many_stages_has_few_microbatches():
    spans = rd.simulate(stages=256, latency=4).timeline().spans
    assert len(spans) == 2 * 256 * 39


def test_torch_is_not_imported():
    code = (
        "import redivider.pipeline.simulate as s, sys; s.simulate(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
