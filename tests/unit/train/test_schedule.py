"""Learning rates by update, and which weights decay."""

import math

import pytest
import torch
from support.training import recipe
from torch import nn

from redivider.train.optim import make_optimizer
from redivider.train.schedule import Schedule


def factors(num, per_epoch, **options):
    schedule = Schedule(recipe(**options), per_epoch, num)
    return [schedule(update) for update in range(num)]


def test_warm_up_is_a_line_and_steps_divide_by_ten():
    """As in the papers: lr (i + 1) / (5 len(loader)) for five epochs, here of ten updates."""
    rates = factors(300, 10, warmup=5, schedule="step", milestones=(15, 22.5))
    wanted = [(i + 1) / 50 if i < 50 else 1.0 for i in range(300)]
    wanted = [w * (0.1 if i >= 150 else 1) * (0.1 if i >= 225 else 1) for i, w in enumerate(wanted)]
    assert rates == pytest.approx(wanted, rel=1e-12)


def test_cosine_ends_at_zero():
    rates = factors(100, 10, warmup=1, schedule="cosine")
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    wanted = [0.5 * (1 + math.cos(math.pi * (i - 10) / 90)) for i in range(10, 100)]
    assert rates[10:] == pytest.approx(wanted)
    assert Schedule(recipe(warmup=1), 10, 100)(100) == 0
    assert factors(5, 10, warmup=0, schedule="constant") == [1.0] * 5


def test_a_run_shorter_than_its_warm_up():
    assert factors(3, 10, warmup=5, schedule="cosine") == pytest.approx([0.02, 0.04, 0.06])


def test_norms_and_biases_do_not_decay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    for kind in ("sgd", "adamw"):
        optimizer = make_optimizer(recipe(optimizer=kind, weight_decay=0.3), model)
        decayed, others = optimizer.param_groups
        assert decayed["params"] == [model[0].weight, model[2].weight]
        assert others["params"] == [model[0].bias, model[1].weight, model[1].bias]
        assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
        assert isinstance(optimizer, torch.optim.SGD if kind == "sgd" else torch.optim.AdamW)
    assert len(make_optimizer(recipe(), nn.LayerNorm(3)).param_groups) == 1


def test_groups_of_muon():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Embedding(4, 2), nn.Linear(2, 2)
    )
    model[3].bias.requires_grad_(False)
    changes = {"muon_scale": "spectral", "muon_rest_lr": 0.5, "betas": (0.8, 0.9), "momentum": 0.6}
    made = make_optimizer(recipe(optimizer="muon", lr=0.02, weight_decay=0.3, **changes), model)
    matrices, tables, vectors = made.param_groups
    assert matrices["params"] == [model[0].weight, model[3].weight]
    assert tables["params"] == [model[2].weight]
    assert vectors["params"] == [model[0].bias, model[1].weight, model[1].bias]
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.3, 0.0]
    assert [group["lr"] for group in made.param_groups] == [0.02, 0.5, 0.5]
    assert (matrices["scale"], matrices["momentum"]) == ("spectral", 0.6)
    assert tables["betas"] == vectors["betas"] == (0.8, 0.9)
