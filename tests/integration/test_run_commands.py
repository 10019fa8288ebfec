"""What is done with a finished run: evaluate, sample, export, load it in Python."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.training import hide, recipe, rows, run_command

import redivider as rd
from redivider.cli import main
from redivider.data import Text, load
from redivider.train.loop import train
from redivider.train.model import evaluate_run, export_run, sample_text
from redivider.train.recipe import Recipe, read_recipe

pytestmark = pytest.mark.slow

EARLIER = Path(__file__).parents[1] / "fixtures" / "run"
"""Run of the version before these commands: its recipe has no shape of the data."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIVIDER_DATA", str(tmp_path / "data"))


def write_text():
    Path("data").mkdir()
    Path("data/input.txt").write_text("the cat sat on the mat, and the rat ran.\n" * 60)


def language(**options) -> Recipe:
    """Return the recipe of a small language model."""
    return Recipe(
        **{
            "name": "words",
            "model": "rev_gpt_nano",
            "model_options": {"width": 16, "depth": 1, "heads": 2},
            "data": "text",
            "context": 8,
            "microbatch": 8,
            "epochs": 2,
            "optimizer": "adamw",
            "lr": 0.01,
            "threads": 1,
            **options,
        }
    )


@pytest.fixture
def earlier():
    shutil.copytree(EARLIER, "earlier")
    return Path("earlier")


def test_a_run_of_an_earlier_version_is_evaluated(earlier, capsys):
    assert main(["evaluate", str(earlier)]) == 0
    end = rows(earlier, "end")[-1]
    assert capsys.readouterr().out == (
        f"earlier: test loss {end['loss']:.4f}, accuracy {end['accuracy']:.2%}\n"
    )
    score = evaluate_run(earlier)
    assert score.accuracy == end["accuracy"] and score.loss == pytest.approx(end["loss"], rel=1e-5)


def test_a_run_of_an_earlier_version_is_loaded_exported_and_reported(earlier, capsys):
    model, used = rd.load_run(earlier)
    assert not model.training and used == read_recipe(earlier / "recipe.json")
    for name, weight in load_file(earlier / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], weight)
    assert main(["export", str(earlier)]) == 0
    assert capsys.readouterr().out == "earlier/model.pt2\n"
    program = torch.export.load("earlier/model.pt2").module()
    for size in (1, 5):
        x = torch.randn(size, 1, 8, 8)
        assert torch.equal(program(x), model(x))
    assert main(["report", str(earlier)]) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_computes_the_same(earlier, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert main(["export", str(earlier), "--format", "onnx", "--out", "made/model.onnx"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "made/model.onnx"
    assert [path.name for path in Path("made").iterdir()] == ["model.onnx"]  # weights included
    session = onnxruntime.InferenceSession("made/model.onnx", providers=["CPUExecutionProvider"])
    (name,) = (value.name for value in session.get_inputs())
    for size in (1, 5):
        x = torch.randn(size, 1, 8, 8)
        (got,) = session.run(None, {name: x.numpy()})
        wanted = rd.load_run(earlier).model(x)
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-5)


def test_without_onnx_a_line_says_what_to_install(earlier):
    words = ("export", earlier, "--format", "onnx")
    code, said = run_command(*words, prepare=(hide, "onnx"))
    assert code == 2 and not Path("earlier/model.onnx").exists()
    assert said == 'redivider: an export to ONNX needs onnx; pip install "redivider[onnx]"\n'


@pytest.mark.parametrize(
    "options",
    [
        {"method": "reverse"},
        {"method": "petra", "stages": 2, "arithmetic": "fixed"},
        {"model": "swin_tiny", "depths": (2,), "model_options": {"patch_size": 2, "window": 2}},
    ],
    ids=str,
)
def test_a_score_is_that_of_the_run_and_the_folder_has_all_that_the_model_needs(options):
    trained = train(recipe(**{"epochs": 0.1, **options}), "run")
    score = evaluate_run("run", device="cpu")
    assert score.accuracy == trained.score.accuracy
    assert score.loss == pytest.approx(trained.score.loss, rel=1e-5)
    stated = json.loads(Path("run/recipe.json").read_text())
    assert stated["shape"] == {"num_classes": 10, "image_size": 8, "in_channels": 1}
    stated["data"] = "imagenet"  # which is not there
    Path("run/recipe.json").write_text(json.dumps(stated))
    model = rd.load_run("run").model
    x, y = load("digits", train=False).batches(360, train=False)[0]
    wanted = torch.nn.functional.cross_entropy(model(x), y).detach()
    assert float(wanted) == pytest.approx(score.loss, rel=1e-4)
    program = torch.export.load(export_run("run", "else/where.pt2")).module()
    assert torch.equal(program(x[:3]), model(x[:3]))


def test_a_recipe_of_a_run_trains_on_other_data():
    train(recipe(epochs=0.1), "run")
    write_text()
    used = read_recipe(Path("run/recipe.json"))
    other = replace(used, model="rev_gpt_nano", depths=(), data="text", context=8)
    options = language().model_options
    train(replace(other, model_options=options), "other")
    shape = json.loads(Path("other/recipe.json").read_text())["shape"]
    assert shape == {"vocabulary": 256, "context": 8}


@pytest.mark.parametrize("options", [{}, {"tokens": 300}], ids=["bytes", "pairs"])
def test_samples_are_those_of_the_model(options, capsys):
    write_text()
    train(language(**options), "run")
    text = load("text", train=True, tokens=options.get("tokens", "bytes"))
    assert isinstance(text, Text)
    vocabulary = text.vocabulary
    model = rd.load_run("run").model
    tokens = vocabulary.encode(b"the cat", where=Path()).long()
    for _ in range(20):  # greedily
        tokens = torch.cat((tokens, model(tokens[None, -8:])[0, -1].argmax(keepdim=True)))
    wanted = vocabulary.decode(tokens.tolist())
    words = ["sample", "run", "--prompt", "the cat", "--tokens", "20"]
    capsys.readouterr()
    assert main([*words, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{wanted}\n"
    texts = [sample_text("run", "the cat", num_tokens=20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("the cat") for text in texts)


def test_random_samples_are_as_frequent_as_the_model_says():
    write_text()
    train(language(epochs=0.3), "run")
    with torch.no_grad():
        logits = rd.load_run("run").model(torch.tensor([list(b"the ")]))[0, -1]
    likely = (logits / 0.7).softmax(0)
    drawn = [sample_text("run", "the ", num_tokens=1, temperature=0.7, seed=i) for i in range(100)]
    best = int(likely.argmax())
    share = sum(text.encode()[-1] == best for text in drawn) / len(drawn)
    assert abs(share - float(likely[best])) < 4 * (0.25 / len(drawn)) ** 0.5


def test_all_runs_of_a_folder_are_evaluated(earlier, capsys):
    shutil.copytree(earlier, "several/a")
    shutil.copytree(earlier, "several/more/b")
    assert main(["evaluate", "several"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["several/a", "several/more/b"]
    assert main(["report", "several"]) == 0
    page = Path("several/report.html").read_text()
    assert "several/a" in page and "several/more/b" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate earlir", "there is no run in earlir; did you mean 'earlier'?"),
        ("export runs/nothing", "there is no run in runs/nothing; `redivider train NAME` makes"),
        ("report erlier", "did you mean 'earlier'?"),
        ("train --resume erlier", "did you mean 'earlier'?"),
        ("sample earlier", "revnet18 was trained on digits"),
        ("sample earlier --prompt=", "a sample needs a prompt"),
        ("sample earlier --temperature nan", "a sample needs a prompt"),
        ("export .", "is a folder of runs; choose one of them: earlier"),
        ("export earlier --format onx", "invalid choice: 'onx'"),
        ("evaluate earlier --device tpu9", "no device 'tpu9'"),
        ("export earlier --out earlier/log.jsonl/x", "earlier/log.jsonl"),
    ],
)
def test_bad_requests_are_one_line(words, said, earlier, capsys):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("redivider: ") and err.count("\n") == 1


def test_runs_that_cannot_be_loaded_say_why(earlier, capsys):
    weights = load_file(earlier / "model.safetensors")
    save_file({**weights, "more": torch.ones(1)}, earlier / "model.safetensors")
    assert main(["evaluate", "earlier"]) == 2
    assert "do not fit the model of its recipe.json" in capsys.readouterr().err
    (earlier / "model.safetensors").write_bytes(b"nothing")
    assert main(["evaluate", "earlier"]) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err
    (earlier / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="the run has not ended; `redivider train --resume"):
        rd.load_run(earlier)


def test_a_model_that_fills_in_words_does_not_continue_a_text():
    write_text()
    train(language(model="rev_roberta_base", epochs=0.3), "run")
    with pytest.raises(ValueError, match="to fill in hidden tokens; take a run of a GPT"):
        sample_text("run")
