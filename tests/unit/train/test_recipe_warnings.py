"""Warnings that a run prints when it begins."""

from dataclasses import replace

import pytest
from support.training import REVNET, recipe

from redivider.train.errors import TrainError
from redivider.train.loop import train
from redivider.train.recipe_warnings import find_warnings


def test_what_does_not_come_to_pass_is_told():
    assert not find_warnings(recipe(epochs=3, warmup=1, schedule="step", milestones=(1, 2)), 100)
    (late,) = find_warnings(recipe(epochs=3, schedule="step", milestones=(2, 150, 225)), 100)
    assert "ends before the rate falls after 150, 225 epochs" in late
    (warm,) = find_warnings(recipe(epochs=3, warmup=3), 100)
    assert "all of the 3 epochs" in warm
    (long,) = find_warnings(recipe(epochs=0.2, accumulate=50), 100)
    assert "takes 0.5 epochs, more than 0.2: --microbatch is " in long
    assert long.endswith("--accumulate 50")


@pytest.mark.parametrize("method", ["reverse", "overlap", "auto", "store", "checkpoint", "petra"])
def test_a_model_without_couplings_is_told_what_reversing_does_for_it(method):
    plain = recipe(model="resnet18", method=method, warmup=0)
    assert not find_warnings(plain, 100)
    warnings = find_warnings(plain, 100, reverses=False)
    assert bool(warnings) == (method in ("reverse", "overlap", "auto"))
    message = f"resnet18 has no couplings to reverse, so that {method}"
    assert all(message in warning for warning in warnings)


def test_more_threads_than_cores_are_told(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert not find_warnings(recipe(threads=2), 100)
    (warning,) = find_warnings(recipe(threads=3), 100)
    assert "--threads is 3, of 2 cores" in warning
    with pytest.raises(TrainError, match="threads must be 0 or more and at most 1024, got 100000"):
        recipe(threads=100_000)


def test_adamw_by_late_gradients_is_told():
    late = recipe(optimizer="adamw", warmup=0, accumulate=4)
    assert not find_warnings(late, 100, num_stages=3)  # one update late
    (warning,) = find_warnings(late, 100, num_stages=14)
    assert "gradients are 6.5 updates late" in warning and "set --stages lower" in warning
    (slow,) = find_warnings(replace(late, latency=2), 100, num_stages=3)
    assert "2 updates late" in slow
    assert not find_warnings(replace(late, optimizer="sgd"), 100, num_stages=14)


@pytest.mark.slow
def test_a_run_says_so_when_it_begins(tmp_path, capsys):
    train(recipe(method="store", epochs=0.1, warmup=1), tmp_path / "short")
    said = "".join(capsys.readouterr())
    assert said.count("warning: the rate rises for all of the 0.1 epochs: --warmup is 1") == 1
    late = recipe(method="petra", epochs=0.1, warmup=0.05, optimizer="adamw", lr=1e-3)
    train(late, tmp_path / "late")  # four stages
    said = "".join(capsys.readouterr())
    assert said.count("warning: the first stage's gradients are 3 updates late") == 1
    plain = REVNET | {"model": "resnet18"}
    train(recipe(method="reverse", epochs=0.1, warmup=0.05, **plain), tmp_path / "plain")
    said = "".join(capsys.readouterr())
    assert said.count("warning: resnet18 has no couplings to reverse") == 1
