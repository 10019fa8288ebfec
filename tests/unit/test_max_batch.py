"""The largest batch is found without a trace, and one more sample would not fit."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import max_batch as support
from support import workers
from torch import nn

import redivider as rd
from redivider.checks import max_batch
from redivider.checks.max_batch import _search, train_once
from redivider.checks.memory import Live

SAMPLE = support.VALUES * support.WIDTH * 4  # bytes of a stream


@pytest.fixture
def at_once(monkeypatch):
    """Run trials in this process: another one takes seconds to start."""

    def run_here(run, job, memory, headroom, *rest):
        return run(max_batch._Trials(job, memory, headroom), *rest)

    monkeypatch.setattr(max_batch, "_in_process", run_here)


def peak(model, size):
    with Live() as live:
        for _ in range(2):
            train_once(model, support.make_batch(size))
    model.zero_grad()
    return live.peak


def weights(model):
    return sum(param.nbytes for param in model.parameters())


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("size", [1, 5, pytest.param(37, marks=pytest.mark.slow)])
def test_one_more_does_not_fit(size):
    model = support.make_model()
    enough = weights(model) + peak(model, size)
    assert rd.find_max_batch(model, support.make_batch, memory=enough, headroom=0) == size
    assert rd.find_max_batch(model, support.make_batch, memory=enough - 1, headroom=0) == size - 1


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_strategies_that_hold_less_fit_more():
    memory = 40 * SAMPLE * support.DEPTH
    sizes = {
        backward: rd.find_max_batch(
            support.make_model(backward), support.make_batch, memory=memory, headroom=0.1
        )
        for backward in ("store", "checkpoint")
    }
    assert sizes["checkpoint"] > 1.2 * sizes["store"]


@pytest.mark.slow
def test_the_caller_sees_nothing(monkeypatch):
    # In processes that do not import torch anew; test_a_process_that_dies starts one as it is.
    monkeypatch.setattr(max_batch, "get_context", lambda method: workers.context)
    model = support.make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert rd.find_max_batch(model, support.make_batch, memory=2**21) > 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_function_that_makes_the_model_keywords_and_outputs_in_a_dict():
    size = rd.find_max_batch(support.Keyword, support.make_keywords, memory=2**22)
    assert size > 1


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_state_of_an_optimizer_counts():
    model = support.make_model()
    plain = rd.find_max_batch(model, support.make_batch, memory=2**20)
    step = support.WithOptimizer()
    assert rd.find_max_batch(model, support.make_batch, step=step, memory=2**20) < plain


@pytest.mark.parametrize(
    "peak, num",
    [
        (lambda size: 7 + size, 8),  # as it should be
        (lambda size: max(500, size), 10),  # small sizes have another peak
        (lambda size: 0.8 * size, 10),  # the device needs more than was counted
        (lambda size: size**1.5 / 1000**0.5, 12),
        (lambda size: 0, 20),
    ],
)
def test_few_sizes_are_tried(peak, num):
    class Trials:
        limit, peaks, seen = 1007.0, dict[int, float](), list[int]()

        def fits(self, size):
            self.seen.append(size)
            if size <= 1000:
                self.peaks[size] = peak(size)
            return size <= 1000

    trials: Any = Trials()
    trials.peaks, trials.seen = {}, []
    assert 1000 - 1000 // 64 <= _search(trials) <= 1000
    assert len(trials.seen) <= num
    assert max(trials.seen) <= 8000


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"memory": 0}, ValueError, "memory must be"),
        ({"headroom": 1}, ValueError, "headroom must be"),
        ({"step": lambda model, batch: None}, ValueError, "define model, make_batch and step in"),
    ],
)
def test_bad_arguments(changes, error, message):
    verify_error(changes, error, message)


@pytest.mark.usefixtures("at_once")
def test_batch_norm_needs_two_samples():
    model = nn.Sequential(nn.Linear(64, 64), nn.Flatten(1), nn.BatchNorm1d(16 * 64))
    size = rd.find_max_batch(model, support.make_batch, memory=2**20)
    assert size >= 2


def test_memory_beyond_the_limit_is_not_even_allocated():
    with pytest.raises(MemoryError), max_batch._Limited(10_000) as live:
        for _ in range(10):
            torch.ones(1000) * torch.ones(1000)
            live.kept = [*getattr(live, "kept", []), torch.ones(1000)]
    assert live.peak <= 14_000


def test_a_frozen_model():
    model = support.make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="is all of it frozen"):
        train_once(model, support.make_batch(1))


@pytest.mark.slow
def test_a_process_that_dies():
    verify_error(
        {"step": support.dying_step}, RuntimeError, 'exit code 3.*if __name__ == "__main__"'
    )


@pytest.mark.parametrize(
    ("memory", "step", "error", "message"),
    [
        (None, train_once, ValueError, r"on the CPU, say how much memory.*memory="),
        (2**22, support.failing_step, RuntimeError, "step failed: KeyError: 'no such layer'"),
    ],
)
def test_errors_in_a_process_reach_the_caller(tmp_path, memory, step, error, message):
    job = tmp_path / "job"
    sent: list[tuple[str, str]] = []
    torch.save((support.make_model(), support.make_batch, step, torch.device("cpu")), job)
    max_batch._child(SimpleNamespace(send=sent.append), _search, job, memory, 0.0)
    (kind, text), *others = sent
    assert kind == error.__name__ and re.search(message, text) and not others


def verify_error(changes, error, message):
    options: Any = {"memory": 2**22, **changes}
    with pytest.raises(error, match=message):
        rd.find_max_batch(support.make_model(), support.make_batch, **options)


@pytest.mark.usefixtures("at_once")
def test_not_even_one_sample():
    assert rd.find_max_batch(support.make_model(), support.make_batch, memory=1) == 0
