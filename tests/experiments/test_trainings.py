"""Trainings of a claim: rows agree with the logs, and no run is trained twice."""

import json
from dataclasses import replace

import pytest
import trainings
from support.training import recipe, stop_in_evaluation
from trainings import RESULTS, read_row, table, train_all

from redivider.train.errors import TrainError
from redivider.train.loop import Stopped
from redivider.train.runs import read_run

pytestmark = pytest.mark.slow


def rows_in(folder):
    return [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]


def test_each_run_has_a_row(tmp_path):
    recipes = [recipe(name=f"{method}-run", method=method) for method in ("store", "petra")]
    rows = train_all(recipes, tmp_path)
    assert rows_in(tmp_path) == rows[::-1]  # by their names
    for row, config in zip(rows, recipes, strict=True):
        run = read_run(tmp_path / config.name)
        assert row == read_row(run.folder)
        assert (row["run"], row["method"], row["seed"]) == (config.name, config.method, 0)
        assert row["last"] == round(run.end[-1]["accuracy"], 5) == row["curve"][-1][2]
        assert row["best"] == round(max(line["accuracy"] for line in run.evaluate), 5)
        assert len(row["curve"]) == len(run.evaluate) == 2
        assert row["MiB"] == round(sum(run.held("activations")) / 2**20, 2) > 0
        assert row["stages"] == (4 if config.method == "petra" else None)
        assert row["torch"] and row["device"] == "cpu"
    text = table(rows)
    assert "store-run" in text and "| petra |" in text.replace("  ", " ")
    assert "curve" not in text


def test_none_follows_one_that_was_stopped_when_it_had_all_but_ended(tmp_path, monkeypatch):
    recipes = [recipe(name=name, method="store", epochs=0.1) for name in ("one", "two")]
    stop_in_evaluation(monkeypatch)
    with pytest.raises(Stopped, match="stopped after one, which has ended"):
        train_all(recipes, tmp_path)
    assert [row["run"] for row in rows_in(tmp_path)] == ["one"] and not (tmp_path / "two").exists()
    assert [row["run"] for row in train_all(recipes, tmp_path)] == ["one", "two"]


def test_a_table_of_one_run_has_its_numbers(tmp_path):
    (row,) = train_all([recipe(name="one")], tmp_path)
    heads, _, line = (line.split(" | ") for line in table([row]).splitlines())
    assert heads[1:5] == ["last accuracy", "best accuracy", "seconds", "MiB"]
    assert heads[5] == "seconds to 90 %" and float(line[4]) == pytest.approx(row["MiB"])


def test_what_has_ended_is_not_trained_again(tmp_path, monkeypatch):
    recipes = [recipe(name="one"), recipe(name="two", seed=1)]
    first = train_all(recipes[:1], tmp_path)
    second = train_all(recipes[1:], tmp_path)
    assert rows_in(tmp_path) == first + second, "what others have trained is still there"
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "recipe.json").write_text("{}")  # another process is about to begin
    monkeypatch.setattr("redivider.train.loop.build", None)  # would be called to train
    assert train_all(recipes, tmp_path) == rows_in(tmp_path) == first + second


def test_other_recipes_in_the_same_folder_are_refused(tmp_path):
    train_all([recipe(name="one")], tmp_path)
    with pytest.raises(TrainError, match=r"one holds a run with another lr, seed; take another"):
        train_all([recipe(name="one", lr=0.01, seed=3)], tmp_path)


@pytest.mark.parametrize("stages", ["auto", 2, (1, 3)])
def test_runs_of_any_stages_are_told_again(stages, tmp_path, monkeypatch):
    config = recipe(name="one", method="petra", stages=stages, lr_by_delay=True)
    rows = train_all([config], tmp_path)
    num = 4 if stages == "auto" else 2
    assert (rows[0]["stages"], rows[0]["lr_by_delay"]) == (num, True)
    assert rows[0]["precision"] == config.precision
    monkeypatch.setattr("redivider.train.loop.build", None)  # would be called to train
    assert train_all([config], tmp_path) == rows
    for others in (3, (3, 1), 2 if stages == "auto" else "auto"):
        with pytest.raises(TrainError, match="one holds a run with another stages; take another"):
            train_all([replace(config, stages=others)], tmp_path)


def test_runs_of_older_versions_are_told_too(tmp_path):
    rows = train_all([recipe(name="one")], tmp_path)
    path, log = tmp_path / "one" / "recipe.json", tmp_path / "one" / "log.jsonl"
    older = {
        key: value for key, value in json.loads(path.read_text()).items() if "delay" not in key
    }
    path.write_text(json.dumps(older))
    assert '"cut": null' in log.read_text()
    log.write_text(log.read_text().replace('"cut": null', '"uncut": null'))
    assert train_all([recipe(name="one")], tmp_path) == rows


def test_a_run_that_diverges_is_told_and_the_others_follow(tmp_path, monkeypatch):
    rows = train_all([recipe(name="wild", lr=1e6, warmup=0.0), recipe(name="calm")], tmp_path)
    assert "NaN or infinite" in rows[0]["failed"] and "last" not in rows[0]
    assert rows[1]["last"] > 0 and rows_in(tmp_path) == rows[::-1]  # by their names
    assert "failed" in table(rows)
    monkeypatch.setattr("redivider.train.loop.build", None)  # would be called to train
    assert train_all([recipe(name="wild", lr=1e6, warmup=0.0)], tmp_path) == rows[:1]


def test_a_race_is_to_the_first_evaluation_at_an_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "WANTED", {"slow": 0.05, "never": 1.1})
    (row,) = train_all([recipe(name="long", epochs=1.0)], tmp_path)
    reached = [seconds for _, seconds, accuracy in row["curve"] if accuracy >= 0.05]
    assert reached and row["slow"] == reached[0]
    assert row["never"] is None and "never" in table([row])


def test_memory_that_was_never_looked_at_is_not_told_as_none(tmp_path):
    train_all([recipe(name="short")], tmp_path)
    log = tmp_path / "short" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"kind": "memory"' not in line))
    assert read_row(tmp_path / "short")["MiB"] is None


def test_quality_is_told_by_stage(tmp_path):
    (row,) = train_all([recipe(name="probed", method="petra", probe_every=20)], tmp_path)
    quality = row["quality"]
    assert {line["stage"] for line in quality} == {0, 1, 2, 3}
    assert all(line["ratio"] == round(line["ratio"], 5) for line in quality if line["ratio"])
    assert all(-1 <= line["cosine"] <= 1.0001 for line in quality if line["cosine"] is not None)
