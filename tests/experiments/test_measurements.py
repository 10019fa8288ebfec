"""Measurements of a claim, as far as a machine without a GPU can show them."""

from typing import Any

import limits
import pytest
import sweep
import torch
from hypothesis import given
from hypothesis import strategies as st
from limits import find_largest, step_fits
from steps import Step

import redivider as rd
from redivider.compile import CompiledArithmetic

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"width": 16, "heads": 2, "depth": 2}


@given(st.integers(0, 5000), st.integers(1, 200))
def test_the_largest_that_fits_but_for_three_percent(true, first):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= true

    largest = find_largest(fits, first)
    assert largest <= true <= max(largest + 1, 1.03 * largest)
    assert len(asked) < 30


def test_there_is_an_end_to_doubling():
    assert find_largest(lambda size: True, 1, limit=1000) >= 512


@pytest.mark.parametrize("model", ["rev_vit_tiny", "rev_roberta_base"])
def test_a_step_has_the_gradients_of_any_way(model):
    small: dict[str, Any] = {"vocabulary": 300, "context": 16}
    if "vit" in model:
        small = {"image_size": 32}
    step = Step(model, 3, CPU, dtype=torch.float32, **SMALL, **small)
    params: list[Any] = list(step.chain.parameters())
    results = []
    for backward in ("store", "store", "reverse"):
        loss = step.run(backward)
        results.append([loss, *(param.grad.clone() for param in params)])
    for one, again, other in zip(*results, strict=True):
        assert torch.equal(one, again), "gradients are new in each step"
        assert torch.allclose(one, other, rtol=0.05, atol=0.02)  # bf16
    assert not any(buffer.is_meta for buffer in step.chain.buffers())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_a_compiled_step_is_compiled_where_it_is_run():
    step = Step("rev_roberta_base", 3, CPU, compiled=True, **SMALL, vocabulary=300, context=16)
    assert isinstance(step.body.arithmetic, CompiledArithmetic)  # of the slice before the loss
    couplings = [unit for unit in step.body if isinstance(unit, rd.Coupling)]
    assert couplings and all(unit.f._compiled_call_impl is not None for unit in couplings)


def test_weights_are_drawn_as_usual_wherever_they_are():
    step = Step("rev_swin_tiny", 1, CPU, depths=(2,), image_size=28, width=24, heads=2)
    usual = rd.create_model(
        "rev_swin_tiny", depths=(2,), image_size=28, width=24, heads=2, dtype=torch.bfloat16
    )
    for (name, one), other in zip(step.chain.named_buffers(), usual.buffers(), strict=True):
        assert torch.equal(one, other), name
    for (name, one), other in zip(step.chain.named_parameters(), usual.parameters(), strict=True):
        assert one.float().std().item() == pytest.approx(other.float().std().item(), abs=0.03), name


def test_a_sweep_ends_where_nothing_fits_any_more(monkeypatch):
    tried = []

    def time(model, batch, device):
        tried.append((model, batch))
        if batch > 4 and model == "large":
            raise torch.OutOfMemoryError("no")
        return {"faster": 1.0}

    monkeypatch.setattr(sweep, "_time", time)
    rows = [row for name in ("small", "large") for row in sweep.measure(name, CPU, {})]
    assert [batch for model, batch in tried if model == "small"] == list(sweep.BATCHES)
    assert [batch for model, batch in tried if model == "large"] == [1, 4, 16]
    tried.clear()
    known = {row["run"]: row for row in rows}
    del known["large/4"]
    again = [row for name in ("small", "large") for row in sweep.measure(name, CPU, known)]
    assert again == [rows[-2]] and tried == [("large", 4)], "nor is more tried than had failed"
    assert rows[-1] == {
        "run": "large/16",
        "model": "large",
        "batch": 16,
        "failed": "it does not fit",
    }


def test_both_ways_are_timed():
    small = {"image_size": 32, "depth": 1, "width": 24, "heads": 2}
    row = sweep._time("rev_vit_tiny", 2, CPU, dtype=torch.float32, **small)
    assert row["ms, reverse"] > 0 and row["ms, overlap"] > 0
    assert row["faster"] == pytest.approx(row["ms, reverse"] / row["ms, overlap"], rel=1e-2)


def test_limits_have_a_row_for_each_way(monkeypatch):
    largest = {"store": 5000, "checkpoint": 20000}
    monkeypatch.setattr(
        limits,
        "step_fits",
        lambda backward, batch, device, **options: (
            batch * options.get("depth", 24) <= largest.get(backward, 40000)
        ),
    )
    rows = {row["run"]: row for name in limits.NAMES for row in limits.measure(name, CPU, {})}
    assert list(rows) == [
        f"{what}-{backward}" for what in ("batch", "depth") for backward in limits.BACKWARDS
    ]
    assert not list(limits.measure("batch-reverse", CPU, rows))
    assert rows["batch-store"]["batch"] == pytest.approx(5000 / 24, rel=0.03)
    assert rows["depth-reverse"]["depth"] == pytest.approx(40000 / 64, rel=0.03)


def test_what_does_not_fit_is_let_go(monkeypatch):
    def run(self, backward):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(limits, "MODEL", "rev_vit_tiny")
    assert step_fits("store", 1, CPU, image_size=32, depth=1)
    monkeypatch.setattr(Step, "run", run)
    assert not step_fits("store", 1, CPU, image_size=32, depth=1)
