"""The schedule: a pure function, and its picture."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import redivider as rd
from redivider.pipeline.diagnostics import timeline
from redivider.pipeline.schedule import KINDS, Action, Schedule

DOCS = Path(__file__).parents[3] / "docs"

PICTURE = """
t        0     1     2     3     4     5     6     7     8
stage 0  F0    F1    F2    F3    F4 B0 B1    B2    B3    B4
stage 1        F0    F1    F2 B0 F3 B1 F4 B2 B3    B4
stage 2              F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
""".strip()

SLOW = """
t        0     1     2     3     4     5     6
stage 0  F0    F1    F2          B0    B1    B2
stage 1              F0 B0 F1 B1 F2 B2
""".strip()


def test_the_picture_is_the_plan():
    assert timeline.draw(3, num_microbatches=5) == PICTURE
    assert timeline.draw(2, num_microbatches=3, latency=2) == SLOW


def test_a_picture_of_an_endless_pipeline_needs_its_width():
    assert len(timeline.draw(2, ticks=4).splitlines()) == 3
    with pytest.raises(ValueError, match="ticks or num_microbatches"):
        timeline.draw(2)


sizes = {"stages": st.integers(1, 7), "latency": st.integers(1, 4), "number": st.integers(0, 9)}


@given(**sizes)
def test_every_micro_batch_passes_every_stage_once_in_order(stages, latency, number):
    schedule = Schedule(stages, latency)
    ticks = schedule.num_ticks(number)
    when: dict[tuple[str, int, int], int] = {}
    for t in range(ticks + 5):
        for action in schedule.actions(t, number):
            assert action not in when
            when[action] = t
    expected = {Action(k, j, n) for k in KINDS for j in range(stages) for n in range(number)}
    assert set(when) == expected
    assert max(when.values(), default=-1) == ticks - 1
    for n in range(number):
        for j in range(stages):
            assert when["B", j, n] - when["F", j, n] == schedule.delay(j)
            if j:
                assert when["F", j, n] - when["F", j - 1, n] == latency
                assert when["B", j - 1, n] - when["B", j, n] == latency
            if n:
                assert when["F", j, n] == when["F", j, n - 1] + 1


@given(**sizes)
def test_a_stage_does_at_most_one_forward_and_one_backward_a_tick(stages, latency, number):
    schedule = Schedule(stages, latency)
    for t in range(schedule.num_ticks(number)):
        pairs = [(kind, j) for kind, j, _ in schedule.actions(t, number)]
        assert len(pairs) == len(set(pairs))
        assert pairs == sorted(pairs, key=lambda pair: (pair[1], pair[0] == "B"))


def test_actions_print():
    assert [str(Action("F", 1, 0)), str(Action("B", 12, 345))] == ["F1.0", "B12.345"]


def test_measured_spans_are_of_what_was_done(tmp_path):
    torch.manual_seed(0)
    units = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]
    pipe = rd.Pipeline(
        units,
        stages=3,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
    )
    with timeline.measured_spans(pipe) as spans:
        for _ in range(4):
            pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))
        pipe.flush()
    pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))
    assert list(spans) == [
        a for t in range(Schedule(3).num_ticks(4)) for a in Schedule(3).actions(t, 4)
    ]
    assert all(start < end for start, end in spans.values())
    timeline.write_chrome_trace(tmp_path / "trace.json", spans)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 24 + 3


def test_a_trace_has_a_row_for_each_stage_and_no_overlap_in_it(tmp_path):
    spans = timeline.planned_spans(3, num_microbatches=5)
    timeline.write_chrome_trace(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 2"}
    for stage in names:
        row = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == stage)
        assert len(row) == 10
        for (start, duration), (after, _) in pairwise(row):
            assert start + duration <= after + 1e-6


def test_a_pipeline_draws_its_plan(tmp_path):
    pytest.importorskip("matplotlib")
    pipe = rd.Pipeline(
        [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)],
        stages=3,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
    )
    plan = pipe.timeline()
    assert str(plan) == PICTURE
    plan.plot(tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    for action in plan.spans:  # a box of every stage has this text
        assert picture.count(f"<!-- {action.kind}{action.microbatch} -->") == 3
    assert len(pipe.timeline(2).spans) == 2 * 3 * 2
    with pytest.raises(ValueError, match="num_microbatches must be at least 1, got 0"):
        pipe.timeline(0)
    with timeline.measured_spans(pipe) as spans:
        pass
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline.plot(tmp_path / "measured.svg", spans)
    with timeline.measured_spans(pipe) as spans:
        pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))
    timeline.plot(tmp_path / "measured.svg", spans)
    assert "<!-- F0 -->" in (tmp_path / "measured.svg").read_text()
