"""The loop: its numbers are those of a loop written by hand, and stopped runs resume."""

import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import training
from support.training import REVNET, recipe, rows, stop_after
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import redivider as rd
from redivider.budget.planner import plan
from redivider.data import load
from redivider.pipeline.checkpoint.files import read_state
from redivider.train.checkpoint import Checkpoints
from redivider.train.compare import compare
from redivider.train.engine import BackpropEngine
from redivider.train.errors import TrainError
from redivider.train.loop import Stopped, Training, train
from redivider.train.recipe import Method, Recipe
from redivider.train.recipes import get_recipe
from redivider.train.run_folder import locked
from redivider.train.runs import read_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def by_hand(num_updates):
    """Train by plain torch: a model, an optimizer, a loop."""
    model = training.revnet()
    optimizer = torch.optim.SGD(
        training.groups(model.parameters()), lr=0.05, momentum=0.9, nesterov=True
    )
    batches = load("digits", train=True).batches(16, train=True, seed=0)
    warm = 0.1 * len(batches) / 2
    losses, correct = [], []
    for update in range(num_updates):
        factor = (update + 1) / warm
        if update + 1 >= warm:
            factor = 0.5 * (1 + math.cos(math.pi * max(0, update - warm) / (num_updates - warm)))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * factor
        optimizer.zero_grad()
        for x, y in (batches[2 * update], batches[2 * update + 1]):
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            (loss / 2).backward()
            losses.append(loss.item())
            correct.append((scores.argmax(1) == y).sum().item())
        optimizer.step()
    return model, losses, correct


def test_the_loop_is_the_one_by_hand(tmp_path):
    config = recipe(method="store", **REVNET)
    result = train(config, tmp_path / "run")
    # Half of 89 micro-batches, in whole updates: 46.
    model, losses, correct = by_hand(23)
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert trained.keys() == model.state_dict().keys()
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    lines = rows(tmp_path / "run")
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 46]
    for line, start in zip(lines, (0, 10, 20, 30, 40), strict=True):
        here = slice(start, line["step"])
        assert line["loss"] == pytest.approx(sum(losses[here]) / len(losses[here]), rel=1e-6)
        assert line["accuracy"] == pytest.approx(sum(correct[here]) / 16 / len(correct[here]))
    model.eval()
    test = load("digits", train=False).batches(360, train=False)
    (x, y) = test[0]
    with torch.no_grad():
        scores = model(x)
    assert result.score.accuracy == pytest.approx((scores.argmax(1) == y).double().mean().item())
    assert result.score.loss == pytest.approx(F.cross_entropy(scores, y).item(), rel=1e-6)
    assert [row["step"] for row in rows(tmp_path / "run", "evaluate")] == [24, 46]


def test_a_pipeline_is_the_one_by_hand(tmp_path):
    config = recipe(method="petra", schedule="constant", warmup=0, **REVNET)
    train(config, tmp_path / "run")
    model = training.revnet("reverse")

    def optimizer(stage):
        return torch.optim.SGD(
            training.groups(stage.parameters()), lr=0.05, momentum=0.9, nesterov=True
        )

    pipe = rd.Pipeline(
        model, stages="auto", loss=F.cross_entropy, optimizer=optimizer, accumulate=2, seed=0
    )
    batches = load("digits", train=True).batches(16, train=True, seed=0)
    ticks = [pipe.step(*batches[step]) for step in range(46)]
    ticks += pipe.flush(update=True)
    losses = [tick.loss.item() for tick in ticks if tick.loss is not None]
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    lines = rows(tmp_path / "run")
    ends = [step - 3 for step in (10, 20, 30, 40)] + [46]  # four stages: three in flight
    for line, start, end in zip(lines, [0, *ends], ends, strict=False):
        assert line["loss"] == pytest.approx(sum(losses[start:end]) / (end - start), rel=1e-6)


@pytest.mark.parametrize("method", get_args(Method))
def test_every_method_goes_through(method, tmp_path):
    config = recipe(method=method, epochs=0.3, probe_every=20 if method == "petra" else 0)
    result = train(config, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert result.score.loss < 2.4
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["method"] == method
    assert len(run.memory) == 1 and sum(run.held("activations")) > 0
    assert bool(run.quality) == (method == "petra")
    if config.is_pipeline:
        assert len(run.held("activations")) == 4
        ticks = {(kind, stage) for kind, stage, *_ in run.timeline[0]["spans"]}
        assert ticks == {(kind, stage) for kind in "FB" for stage in range(4)}


@pytest.mark.parametrize("model", ["rev_gpt_nano", "rev_roberta_base"])
def test_text_and_its_head(model, tmp_path):
    (tmp_path / "input.txt").write_text("to be or not to be, that is the question. " * 200)
    for method in ("store", "petra"):
        config = recipe(
            model=model,
            model_options={"width": 16, "heads": 2, "depth": 1},
            data="text",
            data_folder=str(tmp_path),
            context=16,
            method=method,
            optimizer="adamw",
            lr=1e-2,
            clip_norm=1.0,
            epochs=2,
        )
        result = train(config, tmp_path / method)
        assert result.score.accuracy is None
        assert result.score.loss < 3.3 < math.log(256)
        assert "head.weight" in load_file(tmp_path / method / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that gives the folder of a whole run of a recipe, trained once."""
    folders: dict[str, Path] = {}

    def run(config: Recipe) -> Path:
        text = config.to_json()
        if text not in folders:
            folders[text] = tmp_path_factory.mktemp("whole") / "run"
            train(config, folders[text])
        return folders[text]

    return run


@pytest.mark.parametrize(
    "method, at",
    [
        *(("store", at) for at in (3, 31)),
        ("reverse", 10),
        *(("petra", at) for at in (3, 31)),
        ("delayed", 10),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_last_bit(
    method, at, tmp_path, monkeypatch, undisturbed
):
    network = REVNET if at == 31 else {}  # with buffers
    config = recipe(method=method, save_minutes=1e9, **network)
    whole = undisturbed(config)
    stop_after(monkeypatch, at)
    with pytest.raises(Stopped, match="saved"):
        train(config, tmp_path / "parts")
    torch.manual_seed(99)
    train(config, tmp_path / "parts", resume=True)
    for kind in ("train", "evaluate", "end"):
        assert rows(tmp_path / "parts", kind) == rows(whole, kind)
    ours, theirs = (load_file(run / "model.safetensors") for run in (tmp_path / "parts", whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # And one that has ended ends again, with nothing done.
    before = (tmp_path / "parts" / "log.jsonl").read_text()
    again = train(config, tmp_path / "parts", resume=True)
    assert again.score.loss == rows(tmp_path / "parts", "end")[0]["loss"]
    assert (tmp_path / "parts" / "log.jsonl").read_text() == before


def test_a_run_within_a_budget_resumes_by_its_plan(tmp_path, monkeypatch, undisturbed):
    deep = {"width": 8, "heads": 2, "depth": 4, "patch_size": 2}
    config = recipe(memory="256KiB", model_options=deep, epochs=0.2, save_minutes=1e9)
    whole = undisturbed(config)
    plans = []
    original = BackpropEngine._capture

    def capture(self, inputs):
        plans.append(self.task.body.backward)
        return original(self, inputs)

    monkeypatch.setattr(BackpropEngine, "_capture", capture)
    stop_after(monkeypatch, 4)
    with pytest.raises(Stopped, match="saved"):
        train(config, tmp_path / "parts")
    with monkeypatch.context() as context:
        context.setattr("redivider.train.engine.plan", None)  # it is not made again
        train(config, tmp_path / "parts", resume=True)
    assert plans[0] == plans[1] and len({*plans[0]}) > 1
    assert rows(tmp_path / "parts", "start")[0]["plan"] == list(plans[0])
    ours, theirs = (load_file(run / "model.safetensors") for run in (tmp_path / "parts", whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    captured = []

    def note(*args, **options):
        captured.append(options["capture"])
        return plan(*args, **options)

    monkeypatch.setattr("redivider.train.engine.plan", note)
    for captures in (True, False):
        small = replace(config, memory="1KiB", capture=captures)
        with pytest.raises(TrainError, match=r"no plan fits into 1,024 bytes: .* --microbatch"):
            train(small, tmp_path / "none")
        assert not (tmp_path / "none").exists()  # the same command works with more memory
    assert captured == [True, False]


def test_quality_is_written_before_a_run_stops(tmp_path, monkeypatch):
    config = recipe(method="petra", probe_every=4, log_every=1000, evaluate_every=100)
    stop_after(monkeypatch, 22)
    with pytest.raises(Stopped):
        train(config, tmp_path / "run")
    assert {row["step"] for row in rows(tmp_path / "run", "quality")} == {22}


def test_dropout_goes_on_too(tmp_path, monkeypatch):
    options = {**recipe().model_options, "dropout": 0.5}
    for method in ("reverse", "petra"):
        config = recipe(model_options=options, method=method, epochs=0.3)
        train(config, tmp_path / f"{method}-whole")
        stop_after(monkeypatch, 13)
        with pytest.raises(Stopped):
            train(config, tmp_path / method)
        train(config, tmp_path / method, resume=True)
        assert rows(tmp_path / method) == rows(tmp_path / f"{method}-whole")


def test_tensorboard_has_the_curves(undisturbed):
    run = undisturbed(recipe(method="store", save_minutes=1e9))
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    for kind in ("train", "evaluate"):
        points = [(event.step, event.value) for event in board.Scalars(f"{kind}/loss")]
        wanted = [(row["step"], row["loss"]) for row in rows(run, kind)]
        assert [step for step, _ in points] == [step for step, _ in wanted]
        assert [v for _, v in points] == pytest.approx([v for _, v in wanted], rel=1e-6)


def test_tensorboard_has_memory_and_the_quality_of_gradients(tmp_path):
    train(recipe(method="petra", probe_every=10), tmp_path / "run")
    run, board = read_run(tmp_path / "run"), EventAccumulator(str(tmp_path / "run/tensorboard"))
    scalars = board.Reload().Scalars
    points = [(event.step, event.value) for event in scalars("train/memory_mib")]
    assert points == [(row["step"], pytest.approx(row["memory"] / 2**20)) for row in run.train]
    held = [size / 2**20 for size in run.held("activations")]
    assert scalars("memory/activations_mib")[-1].value == pytest.approx(sum(held))
    for stage, size in enumerate(held):
        (event,) = scalars(f"memory/activations_mib/stage{stage}")
        assert event.value == pytest.approx(size)
        for name in ("cosine", "ratio", "rebuilt_error"):
            wanted = [
                (row["microbatch"], pytest.approx(row[name]))
                for row in run.quality
                if row["stage"] == stage and row[name] is not None
            ]
            tag = f"quality/{name}/stage{stage}"
            found = [(e.step, e.value) for e in scalars(tag)] if wanted else []
            assert found == wanted
    assert len(held) > 1 and len(run.quality) >= 2 * len(held)


def test_the_log_begins_with_date_machine_and_versions(tmp_path):
    train(recipe(epochs=0.1), tmp_path / "run")
    (start,) = read_run(tmp_path / "run").start
    assert abs(datetime.now().astimezone() - datetime.fromisoformat(start["date"])).days == 0
    assert start["machine"].endswith(f"{os.cpu_count()} cores")
    assert start["torch"] == torch.__version__ and start["python"] == platform.python_version()


def test_a_comparison_logs_memory_by_depth_once(tmp_path):
    depths = {"compare_depths": (2, 8), "depths": (2,)}
    net: Any = {"model": "revnet18", "model_options": {"width": 4}, **depths}
    asked = recipe(compare=("store", "reverse"), epochs=0.1, **net)
    folder, rows_of_table = compare(asked, tmp_path / "run")
    held = {row.name: row.run.held_by_depth() for row in rows_of_table}
    for name in held:
        (memory,) = read_run(folder / name).held("activations")
        assert held[name][2] == memory  # the depth that was trained
        shape = {"num_classes": 10, "image_size": 8, "in_channels": 1}
        options: dict[str, Any] = {**shape, "width": 4, "depths": (8,)}
        model = rd.create_model("revnet18", backward=name, **options)
        x, _ = load("digits", train=True).batches(16, train=True, seed=0)[0]
        assert held[name][8] == rd.measure_memory(model, x).held
    assert held["store"][8] > 2 * held["store"][2] and held["reverse"][8] == held["reverse"][2]
    compare(asked, folder, resume=True)
    assert len(read_run(folder / "store").depth) == 2
    page = (folder / "report.html").read_text()
    assert "Memory against depth" in page


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path):
    for method in ("store", "petra"):
        config = recipe(method=method, lr=1e6, schedule="constant", warmup=0, save_minutes=0)
        with pytest.raises(TrainError, match="a lower lr") as error:
            train(config, tmp_path / method)
        assert "\n" not in str(error.value)
    for path in (tmp_path / "store" / "checkpoints").glob("*"):
        saved = read_state(path)["engine"]["model"]
        assert all(
            tensor.isfinite().all() for name, tensor in saved.items() if "running" not in name
        )


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    step = BackpropEngine.step

    def spoilt(self, x, y):
        metrics = step(self, x, y)
        if self.num_updates == 10:
            next(self.task.model.parameters()).data.fill_(torch.inf)
        return metrics

    monkeypatch.setattr(BackpropEngine, "step", spoilt)
    with pytest.raises(TrainError, match="weights are not finite after micro-batch 20"):
        train(recipe(method="store", save_minutes=0), tmp_path / "run")
    paths = (tmp_path / "run" / "checkpoints").iterdir()
    assert [path.name for path in paths] == ["step-000000010"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing here catches it."""


KINDS = ("start", "train", "evaluate", "memory", "timeline", "end")


@pytest.mark.parametrize(
    "where, time",
    [
        *(("Checkpoints.save", time) for time in (1, 2)),
        *(("Checkpoints.save, after", time) for time in (1, 2)),
        ("Training._write_weights", 1),
        *(("Training._write_score", time) for time in (1, 2)),
        ("Training._describe, after", 1),
        *(("Training._write_line, after", time) for time in (1, 2)),
    ],
)
def test_a_run_that_was_killed_anywhere_has_the_same_log(
    where, time, tmp_path, monkeypatch, undisturbed
):
    # Names of TensorBoard's files end in a number of the process. Those of one second are read in
    # the order of their names, and "10" would come before "9".
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    config = recipe(method="petra", epochs=0.3, save_minutes=0)
    whole = undisturbed(config)
    name, _, after = where.partition(", ")
    home, method = name.split(".")
    kind = {"Checkpoints": Checkpoints, "Training": Training}[home]
    original, count = getattr(kind, method), iter(range(1, 100))

    def killed(self, *args, **kwargs):
        is_it = next(count) == time
        if is_it and not after:
            raise Killed
        result = original(self, *args, **kwargs)
        if is_it:
            raise Killed
        return result

    with monkeypatch.context() as patched:
        patched.setattr(kind, method, killed)
        with pytest.raises(Killed):
            train(config, tmp_path / "parts")
    (tmp_path / "parts" / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "parts" / "checkpoints" / ".step-000000010.new-1").mkdir()
    train(config, tmp_path / "parts", resume=True)
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*")) or time == 1
    for row_kind in KINDS:
        lines, expected = rows(tmp_path / "parts", row_kind), rows(whole, row_kind)
        if row_kind == "timeline":
            assert len(lines) == len(expected) == 1
        else:
            assert lines == expected
    seconds = [row["seconds"] for row in read_run(tmp_path / "parts").train]
    assert seconds == sorted(seconds)
    ours, theirs = (load_file(run / "model.safetensors") for run in (tmp_path / "parts", whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    board = EventAccumulator(str(tmp_path / "parts" / "tensorboard")).Reload()
    steps = [event.step for event in board.Scalars("train/loss")]
    assert steps == [row["step"] for row in rows(tmp_path / "parts") if row["loss"] is not None]


def test_two_signals_before_the_first_checkpoint_say_so(tmp_path, monkeypatch, capfd):
    def twice(*args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(BackpropEngine, "step", twice)
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    with pytest.raises(Stopped, match="interrupted, before anything was saved"):
        train(recipe(method="store"), tmp_path / "never")
    assert capfd.readouterr().err.count("redivider: stopping after this update") == 1


def test_a_signal_at_the_very_end_loses_nothing(tmp_path, monkeypatch):
    config = recipe(method="store", epochs=0.2, evaluate_every=100)
    train(config, tmp_path / "whole")
    evaluate = BackpropEngine.evaluate
    signals = iter([1, 2, 0, 0])

    def interrupted(self):
        for _ in range(next(signals)):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self)

    monkeypatch.setattr(BackpropEngine, "evaluate", interrupted)
    result = train(config, tmp_path / "once")  # so near the end it ends
    with pytest.raises(Stopped, match="interrupted, with what was last saved") as stopped:
        train(config, tmp_path / "twice")
    assert stopped.value.folder == tmp_path / "twice"
    again = train(config, tmp_path / "twice", resume=True)
    assert again.score == result.score
    for kind in KINDS:
        assert rows(tmp_path / "twice", kind) == rows(tmp_path / "whole", kind)


def test_a_run_has_its_folder_alone(tmp_path):
    config = recipe(method="store", epochs=0.1)
    with locked(tmp_path):
        code = f"""
from pathlib import Path
from redivider.train.errors import TrainError
from redivider.train.run_folder import locked
try:
    with locked(Path({str(tmp_path)!r})): pass
except TrainError as error:
    assert "another process" in str(error)
else:
    raise SystemExit(1)
"""
        subprocess.run([sys.executable, "-c", code], check=True)
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "recipe.json").write_text(config.to_json())
    (tmp_path / "busy" / "log.jsonl").touch()
    with locked(tmp_path / "busy"), pytest.raises(TrainError, match="another process"):
        train(config, tmp_path / "busy", resume=True)
    folders = [train(config, tmp_path / "run", numbered=True).folder.name for _ in range(3)]
    assert folders == ["run", "run-2", "run-3"]
    with pytest.raises(TrainError, match="exists; choose another folder"):
        train(config, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert train(config, tmp_path / "empty").folder == tmp_path / "empty"


def test_a_finished_run_is_left_alone(tmp_path):
    config = recipe(method="store", epochs=0.1)
    train(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "log.jsonl").read_text()
    train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "log.jsonl").read_text() == before


def test_the_record_does_not_depend_on_where_it_is_run(tmp_path, monkeypatch):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "input.txt").write_text("one and two and three. " * 100)
    monkeypatch.chdir(tmp_path)
    small = {"width": 8, "heads": 2, "depth": 1}
    options = {"data": "text", "data_folder": "words", "context": 8}
    config = recipe(model="gpt_nano", model_options=small, method="store", epochs=0.1, **options)
    train(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert record["data_folder"] == str(tmp_path / "words")
    assert record["device"] in ("cpu", "cuda")


def test_a_finished_run_is_trained_further_in_few_bits(tmp_path, monkeypatch):
    for folder, words in (("first", "one and two and three. "), ("then", "four or five or six? ")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "input.txt").write_text(words * 100)
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"width": 8, "heads": 2, "depth": 2}
    changes: Any = {"context": 8, "precision": "float32", "epochs": 0.5, "data_folder": "first"}
    first = replace(get_recipe("gpt_nano-text"), model_options=options, **changes)
    then = get_recipe("gpt_nano-text-finetune")
    changes |= {"model_options": {**options, **then.model_options}, "data_folder": "then"}
    then = replace(then, **changes)
    with pytest.raises(ValueError, match=r"no file .*model\.safetensors to read weights from"):
        train(then, "runs/none")
    train(first, "runs/gpt_nano-text")
    train(replace(then, lr=1e-12, weight_decay=0.0), "runs/still")
    weights = [load_file(f"runs/{name}/model.safetensors") for name in ("gpt_nano-text", "still")]
    for name, weight in weights[0].items():
        assert torch.allclose(weights[1][name], weight, atol=1e-6)
    for method in ("store", "compress"):
        train(replace(then, method=method, lr=1e-2), f"runs/{method}")
    exact, close = ([row["loss"] for row in rows(Path("runs", m))] for m in ("store", "compress"))
    assert close == pytest.approx(exact, rel=0.01) and close[-1] != exact[-1]
    shutil.rmtree("runs/gpt_nano-text")  # its weights are not needed any more
    trained, _ = rd.load_run("runs/compress")
    assert trained.state_dict().keys() == weights[0].keys()


def test_checkpoints_come_by_the_minute(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, state: saved.append(step))
    times = iter(range(0, 10**6, 60))
    monkeypatch.setattr("redivider.train.loop.time.monotonic", lambda: next(times))
    train(recipe(method="store", save_minutes=1.5), tmp_path / "run")
    assert saved == [20, 40, 46]


def test_folders_may_be_strings(tmp_path):
    folder = str(tmp_path / "run")
    result = train(recipe(epochs=0.1), folder)
    assert str(result.folder) == folder and read_run(folder).end
    with pytest.raises(TrainError, match=r"exists; choose another folder, .* resume=True"):
        train(recipe(epochs=0.1), folder)


def test_a_comparison_is_not_one_training(tmp_path):
    both = recipe(compare=("store", "petra"))
    with pytest.raises(TrainError, match=r"compares store, petra: .*compare=\(\)"):
        train(both, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_killed_before_its_log_begins_anew(tmp_path):
    config = recipe(epochs=0.2)
    whole = train(config, tmp_path / "whole")
    folder = tmp_path / "killed"
    folder.mkdir()
    shutil.copy(tmp_path / "whole" / "recipe.json", folder)
    assert train(config, folder, resume=True).score == whole.score


@pytest.mark.parametrize("tail", [b"\xff\xfe", b"5", b'{"kind": "tr'])
def test_a_damaged_last_line_is_dropped(tail, tmp_path, monkeypatch):
    stop_after(monkeypatch, 12)
    with pytest.raises(Stopped):
        train(recipe(epochs=0.2), tmp_path / "run")
    with (tmp_path / "run" / "log.jsonl").open("ab") as log:
        log.write(tail)
    train(recipe(epochs=0.2), tmp_path / "run", resume=True)
    assert read_run(tmp_path / "run").end


def test_a_checkpoint_of_another_network_says_so(tmp_path, monkeypatch):
    stop_after(monkeypatch, 12)
    with pytest.raises(Stopped):
        train(recipe(epochs=0.2), tmp_path / "run")
    wider = {**recipe().model_options, "width": 16}
    with pytest.raises(TrainError, match=r"does not fit: size mismatch for .*\)\.$"):
        train(recipe(model_options=wider, epochs=0.2), tmp_path / "run", resume=True)


@pytest.mark.parametrize("method", ["store", "petra"])
def test_full_memory_is_said_in_a_line(method, tmp_path, monkeypatch):
    forward, count = torch.nn.BatchNorm2d.forward, iter(range(10**6))

    def full(self, x):
        if next(count) > 100:
            torch.empty(2**60, dtype=torch.uint8)
        return forward(self, x)

    monkeypatch.setattr(torch.nn.BatchNorm2d, "forward", full)
    with pytest.raises(TrainError) as raised:
        train(recipe(method=method, **REVNET), tmp_path / "run")
    said = str(raised.value)
    much = f"no memory is left on cpu for {2**40:,} MiB"
    assert re.match(rf"{much}, in .*block.*; .*a run with a smaller --microbatch", said), said
    assert ("--method reverse" in said) == (method == "store")
    assert read_run(tmp_path / "run").train


CPU_FULL = (  # of builds of torch that allocate in different ways
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 7340032 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 7340032 bytes.",
)
FULL: dict[Exception, str] = {
    **{RuntimeError(text): "7 MiB" for text in CPU_FULL},
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"): "2.50 GiB",
    MemoryError("Unable to allocate 7.28 TiB for an array with shape (10,)"): "7.28 TiB",
}


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_what_cannot_be_built_for_want_of_memory_says_so(error, tmp_path, monkeypatch):
    def full(*args):
        raise error

    monkeypatch.setattr("redivider.train.build.make_task", full)
    line = f"no memory is left on cpu for {FULL[error]}; "
    with pytest.raises(TrainError, match=rf"{line}.* takes less$"):
        train(recipe(), tmp_path / "run")
    with pytest.raises(TrainError, match=line):
        compare(recipe(compare=("store", "petra")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_errors_are_not_about_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("redivider.train.build.make_task", lambda *args: torch.ones(2) @ 3)
    with pytest.raises(TypeError):
        train(recipe(), tmp_path / "run")
    monkeypatch.setattr("redivider.train.build.make_task", lambda *args: torch.ones(2).view(3))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        train(recipe(), tmp_path / "run")


@pytest.mark.slow
def test_depths_are_measured_with_as_many_threads_as_the_recipe_says(tmp_path, monkeypatch):
    seen = []

    def measure(variant):
        seen.append(torch.get_num_threads())
        return {}

    monkeypatch.setattr("redivider.train.compare.measure_depths", measure)
    before = torch.get_num_threads()
    asked = recipe(compare=("store", "petra"), stages=2, epochs=0.1, threads=before + 1)
    compare(asked, tmp_path / "run")
    assert seen == [before + 1] * 2 and torch.get_num_threads() == before
