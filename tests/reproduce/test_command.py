"""`redivider reproduce` as a user gives it."""

import json

import pytest
import torch

from redivider.cli import main
from redivider.reproduce import sweep
from redivider.reproduce.claims import CLAIMS
from redivider.train.loop import Stopped

SMALL = "--data digits --model-options width 4 --depths 1 1 --microbatch 16 --precision float32"


def test_claims_are_listed(capsys):
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [each.name for each in CLAIMS]


def test_some_runs_and_then_some_more(tmp_path, capsys):
    words = f"reproduce methods --out {tmp_path} --epochs 0.3 {SMALL} --only store-64x2".split()
    assert main(words) == 0
    first = (tmp_path / "results.jsonl").read_text()
    assert json.loads(first)["run"] == "store-64x2"
    assert main([*words, "petra-64x2"]) == 0
    assert main([*words, "petra-64x2"]) == 0, "a pipeline writes its stages into its recipe"
    both = (tmp_path / "results.jsonl").read_text()
    assert both.endswith(first) and both.count("\n") == 2
    out = capsys.readouterr().out
    assert "| petra-64x2 | petra |" in out and str(tmp_path / "results.jsonl") in out
    assert main([*words, "--lr", "0.5"]) == 2
    assert "store-64x2 holds a run with another lr" in capsys.readouterr().err


def test_a_stopped_one_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def stop(*given, **options):
        raise Stopped("stopped after 3 micro-batches and saved", tmp_path)

    monkeypatch.setattr("redivider.reproduce.trainings.train", stop)
    assert main(f"reproduce latency --out {tmp_path}".split()) == 130
    assert "and saved; go on with the same command" in capsys.readouterr().err


@pytest.mark.parametrize("only", [(), ("rev_vit_small",)])
def test_measurements_write_rows_as_they_come(only, tmp_path, monkeypatch, capsys):
    words = ["reproduce", "overlap", "--out", str(tmp_path)]
    if not torch.cuda.is_available():
        assert main(words) == 2 and "overlap measures a GPU" in capsys.readouterr().err
    monkeypatch.setattr("redivider.train.machine.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(sweep, "_time", lambda model, batch, device: {"faster": 1.5})
    more = ["--only", *only] if only else []
    assert main([*words, *more]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["model"] for row in rows} == set(only or sweep.NAMES)
    monkeypatch.setattr(sweep, "_time", lambda model, batch, device: {"faster": 2.0})
    assert main([*words, "--only", "rev_mvit_base"]) == 0
    more = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["model"] for row in more} == {*(only or sweep.NAMES), "rev_mvit_base"}
    again = {row["faster"] for row in more if row["model"] == "rev_mvit_base"}
    assert again == ({2.0} if only else {1.5}), "what is there is not measured again"
    assert "| rev_vit_small/64 |" in capsys.readouterr().out
