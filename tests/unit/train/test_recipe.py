"""Recipes: records that survive JSON and refuse wrong values."""

import json
from dataclasses import replace

import pytest
from support.training import recipe

from redivider.models.catalogue import list_models
from redivider.train.errors import TrainError
from redivider.train.overrides import override
from redivider.train.recipe import Recipe, read_recipe
from redivider.train.recipes import RECIPES, get_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back_from_json(name, tmp_path):
    original = get_recipe(name)
    assert original.name == name and original.model in list_models()
    (tmp_path / "recipe.json").write_text(original.to_json())
    assert read_recipe(tmp_path / "recipe.json") == original


def test_every_row_of_table_2_is_there():
    """Three ResNets by backprop and three RevNets by both, on four data sets."""
    names = [name for name in RECIPES if name.endswith(("-backprop", "-petra"))]
    assert len(names) == 36
    for name in names:
        model, data, how = name.split("-")
        row = get_recipe(name)
        assert (row.model, row.data, row.is_pipeline) == (model, data, how == "petra")
        cifar, large = data.startswith("cifar"), data == "imagenet"
        assert row.epochs == (300 if cifar else 90)
        assert row.milestones == ((150, 225) if cifar else (30, 60, 80))
        assert row.lr == pytest.approx(0.1 if large else 0.05)
        assert row.microbatch * row.accumulate == (256 if large else 128)
        assert row.weight_decay == (5e-4 if cifar else 1e-4)
        assert (row.optimizer, row.momentum, row.warmup) == ("sgd", 0.9, 5)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"lr": "fast"}, "lr must be float, got 'fast'"),
        ({"lr": 0.0}, "must be above 0"),
        ({"epochs": -1}, "must be above 0"),
        ({"microbatch": 0}, "microbatch must be 1 or more"),
        ({"microbatch": 2.5}, "microbatch must be int"),
        ({"accumulate": True}, "accumulate must be int"),
        ({"warmup": float("nan")}, "warmup must be 0 or more"),
        ({"method": "petr"}, "method must be one of store"),
        ({"milestones": ["soon"]}, "milestones must be"),
        ({"betas": [0.9]}, "betas must be"),
        ({"model_options": {"depth": [1]}}, "model_options must be"),
        ({"stages": "some"}, "stages must be"),
        ({"latency": 0.7}, "latency must be a multiple of 0.5"),
        ({"latency": 0}, "latency must be 0.5 or more"),
        ({"compile": "yes"}, "compile must be bool"),
        ({"memory": "much"}, "memory is a whole number of bytes"),
        ({"memory": "6GiB", "method": "petra"}, "use --method reverse"),
    ],
)
def test_wrong_values_are_refused(wrong, said):
    with pytest.raises(TrainError) as error:
        recipe(**wrong)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_hold_no_recipe(tmp_path):
    path = tmp_path / "recipe.json"
    good = json.loads(recipe().to_json())
    for text, said in (
        ("{", "is not JSON"),
        ("[1]", "must hold an object"),
        (json.dumps({**good, "epoch": 3}), "no field 'epoch'; did you mean 'epochs'?"),
        (json.dumps({"name": "x", "data": "digits"}), "has no model"),
        (json.dumps({**good, "epochs": "x"}), "epochs must be float, got 'x'"),
    ):
        path.write_text(text)
        with pytest.raises(TrainError, match=r"recipe\.json") as error:
            read_recipe(path)
        assert said in str(error.value)
    with pytest.raises(TrainError, match="No such file"):
        read_recipe(tmp_path / "none.json")


@pytest.mark.slow
def test_every_field_can_be_set_on_the_command_line():
    before = recipe(model_options={"width": 4})
    for words, changed in (
        ([], {}),
        (["--epochs", "3.5", "--method", "petra"], {"epochs": 3.5, "method": "petra"}),
        (["--stages", "3"], {"stages": 3}),
        (["--stages", "auto"], {"stages": "auto"}),
        (["--compile", "--no-capture"], {"compile": True, "capture": False}),
        (["--milestones", "1", "2.5"], {"milestones": (1.0, 2.5)}),
        (["--betas", "0.8", "0.9"], {"betas": (0.8, 0.9)}),
        (["--model_options", "depth", "3"], {"model_options": {"width": 4, "depth": 3}}),
        (["--model-options", "width", "8"], {"model_options": {"width": 8}}),
        (["--model-options.width", "8"], {"model_options": {"width": 8}}),
        (["--tokens", "512", "--data=text"], {"tokens": 512, "data": "text"}),
        (["--lookahead", "momentum"], {"lookahead": "momentum"}),
        (["--compare", "store", "petra"], {"compare": ("store", "petra")}),
        (["--memory", "6GiB"], {"memory": "6GiB"}),
    ):
        assert override(before, words) == replace(before, **changed)
    values = {name: getattr(before, name) for name in Recipe.__dataclass_fields__}
    for name, value in values.items():
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            assert override(before, [f"--{name.replace('_', '-')}", str(value)]) == before


@pytest.mark.parametrize(
    "words, said",
    [
        (["--epocs", "3"], "no field --epocs; did you mean epochs?"),
        (["--zzz", "3"], "redivider train quickstart --help` lists all"),
        (["--epochs", "three"], "--epochs: could not convert string to float: 'three'"),
        (["--epochs"], "Missing value for argument '--epochs'"),
        (["--method", "petr"], "invalid choice 'petr'"),
        (["--epochs", "0"], "must be above 0"),
        (["more"], "more"),
    ],
)
def test_words_that_set_nothing(words, said):
    with pytest.raises(TrainError) as error:
        override(recipe(), words)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_method_that_is_told_is_trained_by_alone():
    quickstart = get_recipe("quickstart")
    assert len(quickstart.compare) > 1
    for words in ("--method dsp", "--method=dsp"):
        alone = override(quickstart, words.split())
        assert (alone.method, alone.compare) == ("dsp", ())
    both = override(quickstart, "--method dsp --compare store petra".split())
    assert (both.method, both.compare) == ("dsp", ("store", "petra"))
    planned = override(quickstart, "--method reverse --memory 1MiB".split())
    assert (planned.memory, planned.compare) == ("1MiB", ())
    assert override(quickstart, ["--lr", "0.1"]).compare == quickstart.compare
