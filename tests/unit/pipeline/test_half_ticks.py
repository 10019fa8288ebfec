"""Schedules in which messages travel for halves of a tick."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from support.networks import MLP
from torch import nn

import redivider as rd
from redivider.pipeline.diagnostics import timeline
from redivider.pipeline.schedule import Action, Kind, Schedule, resolve_latency

HALF = """
t        0     1     2     3     4     5     6
stage 0  F0    F1    F2 B0 F3 B1 F4 B2 B3    B4
stage 1  F0    F1    B0 F2 B1 F3 B2 F4 B3    B4
stage 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
""".strip()

MIXED = """
t        0     1     2     3     4     5     6
stage 0  F0    F1    F2    F3 B0 B1    B2    B3
stage 1  F0    F1    F2    B0 F3 B1    B2    B3
stage 2        F0 B0 F1 B1 F2 B2 F3 B3
""".strip()


def test_the_picture_is_the_plan():
    assert timeline.draw(3, num_microbatches=5, latency=0.5) == HALF
    assert timeline.draw(3, num_microbatches=4, latency=(0.5, 1)) == MIXED


def orders(schedule: Schedule, number: int) -> list[list[Action]]:
    """Return the actions of every stage, in their order."""
    actions = [a for t in range(schedule.num_ticks(number)) for a in schedule.actions(t, number)]
    return [[a for a in actions if a.stage == j] for j in range(schedule.num_stages)]


latencies = st.integers(1, 6).map(lambda slots: slots / 2)
schedules = st.integers(1, 8).flatmap(
    lambda stages: st.one_of(
        latencies, st.tuples(*[latencies] * (stages - 1)) if stages > 1 else latencies
    ).map(lambda latency: Schedule(stages, latency))
)


@given(schedules)
def test_a_gradient_is_as_late_as_its_message_travels(schedule):
    """The delay in backward passes: the slots from a stage to the last one."""
    number = schedule.num_in_flight + 4
    total = schedule.latency
    hops = total if isinstance(total, tuple) else (total,) * (schedule.num_stages - 1)
    for j, actions in enumerate(orders(schedule, number)):
        assert schedule.delay(j) == 2 * sum(hops[j:])
        num_backward, seen_by = 0, {}
        for action in actions:
            if action.kind == "F":
                seen_by[action.microbatch] = num_backward
            else:
                delay = num_backward - seen_by[action.microbatch]
                assert delay == min(action.microbatch, schedule.delay(j))
                num_backward += 1
        assert num_backward == number


@given(schedules)
def test_a_message_is_sent_before_it_is_read(schedule):
    number = schedule.num_in_flight + 4
    when = {}
    for t in range(schedule.num_ticks(number)):
        for group, actions in enumerate(schedule.groups(t, number)):
            for place, action in enumerate(actions):
                when[action] = (t, group, place)
    last = schedule.num_stages - 1
    for kind, j, n in when:
        if kind == "F" and j < last:
            assert when["F", j, n][:2] < when["F", j + 1, n][:2]
        if kind == "B" and j > 0:
            assert when["B", j, n][:2] < when["B", j - 1, n][:2]
        if kind == "F" and j == last:  # nothing comes between, so no graph outlives a tick
            t, group, place = when["F", j, n]
            assert when["B", j, n] == (t, group, place + 1)
        if kind == "B" and j < last:
            updates_after = (when["B", j, n][0], when["B", j, n][1])
            forwards = [when["F", j, m][:2] for m in range(number)]
            assert updates_after not in forwards or schedule.num_groups == 1


@given(schedules, st.integers(1, 7))
@example(Schedule(3, (0.5, 1)), 2)  # down from the last stage it takes longer than up
@example(Schedule(2, 2.5), 1)
def test_neighbours_count_a_message_in_the_same_slot(schedule, cut):
    """So their batches mirror each other, whatever the processes hold."""
    if cut >= schedule.num_stages:
        return
    spread = [range(cut), range(cut, schedule.num_stages)]
    number = schedule.num_in_flight + 2
    read = {action: t for t in range(99) for action in schedule.actions(t, number)}
    for t in range(schedule.num_ticks(number)):
        for group in range(schedule.num_groups):
            for one, other in (spread, spread[::-1]):
                legs = schedule.sent(t, group, one, number)
                assert legs == schedule.received(t, group, other, number)
                assert len(legs) <= 1
                for leg in legs:
                    kind: Kind = "F" if leg.direction == "up" else "B"
                    due = read[Action(kind, leg.stage, leg.microbatch)]
                    assert not schedule.is_read(leg, due) and schedule.is_read(leg, due + 1)
                    assert due - t <= schedule.max_ticks


def test_planned_spans_wait_for_messages_and_for_nothing_else():
    spans = timeline.planned_spans(4, latency=0.5, num_microbatches=40)
    for (kind, j, n), (start, end) in spans.items():
        sender = Action(kind, j - 1 if kind == "F" else j + 1, n)
        assert end - start == (1.0 if kind == "F" else 3.0)
        assert sender not in spans or spans[sender][1] <= start
    for j in range(4):
        own = sorted(span for action, span in spans.items() if action.stage == j)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    # A full pipeline does a forward and a backward of every stage in the time of both.
    starts = [spans[Action("F", 0, n)][0] for n in range(20, 30)]
    assert [after - before for before, after in pairwise(starts)] == [4.0] * 9


@pytest.mark.parametrize("latency", [0.5, 1, 3])
def test_one_stage_has_no_neighbours(latency):
    schedule = Schedule(1, latency)
    assert schedule.max_ticks == 1 and schedule.num_in_flight == 0
    assert schedule.actions(4) == (Action("F", 0, 4), Action("B", 0, 4))


@pytest.mark.parametrize(
    "latency, stages, result",
    [
        (2, 3, 2),
        (1.0, 3, 1),
        (0.5, 3, 0.5),
        ([1, 1], 3, 1),
        ([0.5, 1.0], 3, (0.5, 1)),
        ([], 1, 1),
    ],
)
def test_equal_latencies_have_one_form(latency, stages, result):
    """So that a state fits, whoever saved it."""
    resolved = resolve_latency(latency, stages)
    assert resolved == result and type(resolved) is type(result)


def build(latency, stages: int = 3) -> rd.Pipeline:
    torch.manual_seed(0)
    units = [nn.Linear(5, 8), rd.Duplicate(), rd.Coupling(MLP(8)), rd.Fuse(), nn.Linear(16, 3)]
    return rd.Pipeline(
        units,
        stages=stages,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
        latency=latency,
    )


@pytest.mark.parametrize("latency", [0, -0.5, 0.3, "1", None, float("inf"), [1, 0.7], [None, 1]])
def test_other_latencies_are_refused(latency):
    with pytest.raises(ValueError, match=r"latency must be a multiple of 0\.5"):
        build(latency)


def test_a_list_has_a_latency_for_every_pair_of_neighbours():
    with pytest.raises(ValueError, match="latency has 3 numbers for 3 stages"):
        build([1, 1, 1])


def test_junctions_keep_half_as_many_inputs():
    """At most one for every stage from theirs on, at any moment, where it was two."""
    for latency in (0.5, 1):
        pipe, most = build(latency, stages=5), [0] * 5
        pipe.observer = lambda *_, pipe=pipe, most=most: most.__setitem__(
            slice(None),
            [max(m, len(s.units[0].kept)) for m, s in zip(most, pipe.stages, strict=True)],
        )
        for n in range(20):
            torch.manual_seed(n)
            pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))
        # The last stage runs its backward at once, before anybody looks.
        assert most[:-1] == [2 * latency * (4 - j) + 1 for j in range(4)]
