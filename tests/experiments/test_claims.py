"""Claims: their recipes are those that they state, and names of runs are unique."""

import re
from dataclasses import replace
from typing import Any

import pytest
from claims import CLAIMS, get_claim, short
from reproduce import choose

import redivider as rd
from redivider.train.errors import TrainError
from redivider.train.recipe import Recipe
from redivider.train.recipes import get_recipe


def test_names_are_those_of_folders_and_of_one_claim_each():
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)
    for claim in CLAIMS:
        ways = [claim.runs, claim.measurement, claim.scripts]
        assert claim.statement and sum(map(bool, ways)) == 1
        assert len(set(claim.names)) == len(claim.names)


def test_all_recipes_of_a_claim_see_as_many_samples_an_update_unless_it_asks():
    for name in ("methods", "microbatch", "lookahead", "latency", "stages"):
        for run in get_claim(name).runs:
            assert run.microbatch * run.accumulate == 128, run.name
            assert run.lr == pytest.approx(0.05) and run.epochs == 20
            assert run.milestones == (10, 15) and run.warmup == 5
    numbers = [run.accumulate for run in get_claim("accumulate").runs if run.method == "petra"]
    assert numbers == [1, 2, 4, 8, 16, 32]
    for name, samples in (("vit", 128), ("gpt", 32)):
        assert {run.microbatch * run.accumulate for run in get_claim(name).runs} == {samples}
        assert {run.lr_by_delay for run in get_claim(name).runs} == {False, True}
        assert {run.stages for run in get_claim(name).runs} == {"auto", 8}
        assert sum(run.betas == (0.5, 0.95) for run in get_claim(name).runs) >= 4, name
    sizes = {(run.microbatch, run.method) for run in get_claim("microbatch").runs}
    assert sizes == {(n, method) for n in (4, 8, 16, 32, 64) for method in ("petra", "store")}


def test_equal_trainings_have_one_name_and_others_another():
    """So claims may share a folder, and the runs that they have in common are trained once."""
    seen: dict[str, Recipe] = {}
    names = ("methods", "microbatch", "accumulate", "lookahead", "latency", "stages", "rate")
    for name in (*names, "quality"):
        for run in get_claim(name).runs:
            assert seen.setdefault(run.name, run) == run


def test_backprop_and_petra_by_muon_differ_in_nothing_else():
    runs = get_claim("muon").runs
    assert len({run.seed for run in runs}) == 3
    for run in runs:
        assert (run.optimizer, run.schedule, run.epochs) == ("muon", "cosine", 20)
        plain = replace(run, name="one", method="store", latency=1, lookahead=None)
        assert any(plain == replace(other, name="one") for other in runs)


def test_deep_networks_by_muon_differ_from_the_best_recipe_in_what_they_say():
    best = replace(get_recipe("revnet18-cifar10-best"), name="x", milestones=())
    for claim in ("sooner", "deeper"):
        for run in get_claim(claim).runs:
            model = next((m for m in ("revnet34", "revnet50") if m in run.name), "revnet18")
            assert run.model == model and run.epochs == (20 if model == "revnet50" else run.epochs)
            assert ("epochs" in run.name) == (claim == "sooner")
            assert run.latency == (0.5 if run.method == "petra" else 1)
            assert run.label_smoothing == 0.1 and "smoothed" in run.name
            assert (run.microbatch, run.accumulate) == ((32, 4) if run.latency == 0.5 else (64, 2))
            names = ("name", "model", "method", "latency", "microbatch", "accumulate")
            same: dict[str, Any] = {name: getattr(best, name) for name in names}
            assert replace(run, **same, milestones=(), epochs=20, label_smoothing=0) == best
            if model != "revnet18":
                assert len(list(rd.create_model(model, device="meta", image_size=32))) == 18
    race = get_claim("race").runs
    assert {(run.optimizer, run.compile, run.method) for run in race} >= {
        ("muon", compiled, method) for compiled in (False, True) for method in ("store", "petra")
    }
    assert {run.microbatch * run.accumulate for run in race} == {128}


def test_the_best_recipes_are_runs_of_claims():
    """Their results are those of experiments/muon."""
    for recipe, claim, name in [
        ("revnet18-cifar10-best", "muon", "petra-64x2-muon-latency-0.5-lr-0.05"),
        ("rev_vit_small-cifar10-best", "vit", "petra-4x32-8-stages-muon-latency-0.5"),
        ("rev_gpt_small-text-best", "gpt", "petra-1x32-8-stages-muon-latency-0.5"),
    ]:
        run = next(run for run in get_claim(claim).runs if run.name == name)
        best = get_recipe(recipe)
        assert replace(run, name="x", milestones=(), evaluate_every=1.0) == replace(best, name="x")


def test_the_full_runs_are_those_of_the_paper():
    for run in get_claim("revnet18").runs:
        assert (run.epochs, run.milestones, run.warmup) == (300, (150, 225), 5)
        assert (run.microbatch, run.accumulate, run.lr) == (64, 2, pytest.approx(0.05))
        assert run.weight_decay == 5e-4 and run.momentum == 0.9
    assert [run.method for run in get_claim("revnet18").runs] == ["store", "petra"]


def test_names_of_runs_say_what_is_other_than_usual():
    assert short("petra").name == "petra-64x2"
    assert short("petra", 16, 8, lookahead="lead").name == "petra-16x8-lead"
    assert short("petra", latency=4).name == "petra-64x2-latency-4"
    assert short("petra", stages=4).name == "petra-64x2-stages-4"
    assert short("store", lr=0.025).name == "store-64x2-lr-0.025"
    assert short("petra", lr_by_delay=True).name == "petra-64x2-by-delay"
    assert short("petra", stages=2, compile=True).name == "petra-64x2-stages-2-compiled"
    assert short("petra", stages=(4, 6)).name == "petra-64x2-stages-4-6"


def test_names_of_small_runs_say_how_they_are_trained():
    runs = get_claim("small").runs
    assert len(runs) == 15
    for run in runs:
        assert run.microbatch * run.accumulate == 32
        assert run.name.startswith(f"{run.method}-{run.optimizer}")
        assert run.lr == (0.003 if "0.003" in run.name else 0.002 if "muon" in run.name else 0.001)
        if run.method == "petra":
            assert f"-{run.microbatch}x{run.accumulate}-{run.stages}" in run.name
        assert run.lr_by_delay == ("careful" in run.name)
        is_careful = re.search("careful|betas", run.name) is not None
        assert run.betas == ((0.5, 0.95) if is_careful else (0.9, 0.95))
        assert run.latency == (0.5 if "latency-0.5" in run.name else 1)


@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_names_of_transformers_say_how_they_are_trained(name):
    usual, *others = get_claim(name).runs
    assert usual.name == "store"
    for run in others:
        is_careful = re.search("by-delay|8-stages$", run.name) is not None
        assert run.name.startswith(run.method)
        assert run.lr_by_delay == is_careful
        has_betas = is_careful or run.name == "store-betas"
        assert run.betas == ((0.5, 0.95) if has_betas else usual.betas)
        assert run.stages == (8 if "8-stages" in run.name else "auto")
        assert run.optimizer == ("muon" if "muon" in run.name else "adamw")
        assert run.latency == (0.5 if "latency-0.5" in run.name else 1)
        if size := re.search(r"(\d+)x(\d+)", run.name):
            assert [run.microbatch, run.accumulate] == [*map(int, size.groups())]


def test_some_runs_more_seeds_and_fields_for_all():
    claim = get_claim("methods")
    runs = choose(claim, ["dsp-64x2", "store-64x2"], 3, ["--epochs", "2"])
    assert [run.name for run in runs] == [
        "store-64x2",
        "dsp-64x2",
        "store-64x2-seed1",
        "dsp-64x2-seed1",
        "store-64x2-seed2",
        "dsp-64x2-seed2",
    ]
    assert {run.epochs for run in runs} == {2.0}
    assert [run.seed for run in runs] == [0, 0, 1, 1, 2, 2]
    assert [run.seed for run in choose(claim, ["dsp-64x2"], 2, ["--seed", "5"])] == [5, 6]
    with pytest.raises(TrainError, match="methods has no run 'dps-64x2'; did you mean 'dsp-64x2'"):
        choose(claim, ["dps-64x2"], 1, [])


def test_what_is_not_there():
    with pytest.raises(TrainError, match="there is no claim 'method'; did you mean 'methods'"):
        get_claim("method")
