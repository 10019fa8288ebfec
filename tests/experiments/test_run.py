"""`python experiments/run.py` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import scripts
import sweep
import torch
from claims import CLAIMS, Claim, Script
from run import main

from redivider.train.loop import Stopped

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "experiments" / "run.py"
SMALL = "--data digits --model-options width 8 --depths 1 1 --microbatch 16 --precision float32"


def test_claims_are_listed(capsys):
    assert main([]) == 0
    claims, runs = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in claims.splitlines()] == [claim.name for claim in CLAIMS]
    assert "revnet34    backprop petra\n" in runs and "`--only RUN ...`" in runs


def test_listing_runs_anywhere_and_without_torch(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import run; run.main([])"
    code += "; assert 'torch' not in sys.modules"
    for words in ([str(SCRIPT)], ["-c", code, str(SCRIPT.parent)]):
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("revnet18 ") and not done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nothing", "there is no claim 'nothing'; `python experiments/run.py` lists all"),
        ("methods --only dps-64x2", "has no run 'dps-64x2'; did you mean 'dsp-64x2'?"),
        ("methods --seeds 0", "--seeds must be 1 or more, got 0"),
        ("methods --seeds", "`python experiments/run.py --help` shows how"),
        ("methods --epoch 3", "a recipe has no field --epoch; did you mean epochs?"),
        ("--epochs 3 methods", "the name comes first: `python experiments/run.py NAME"),
        ("overlap --epochs 3", "overlap is measured, not trained"),
        ("overlap --only rev_vit_smal", "no run 'rev_vit_smal'; did you mean"),
        ("limits --only batch", "limits has no run 'batch'"),
        ("finetune --only gpd", "finetune has no run 'gpd'; did you mean 'gpt'?"),
        ("scale --epochs 3", "scale is measured, not trained"),
        ("--only dsp-64x2", "which claim? `python experiments/run.py` lists them"),
    ],
)
def test_bad_input_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("redivider: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_seed_is_not_short_for_seeds(tmp_path, capsys):
    words = f"methods --out {tmp_path} --epochs 0.1 {SMALL} --only store-64x2 --seed 3"
    assert main(words.split()) == 0
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert (row["run"], row["seed"]) == ("store-64x2-seed3", 3)
    out = capsys.readouterr().out
    assert "| run | last accuracy | best accuracy | seconds |" in out
    assert "| store-64x2-seed3 |" in out


def test_what_a_claim_compares_is_not_changed_under_its_names(tmp_path, capsys):
    words = f"methods --out {tmp_path} {SMALL} --only store-64x2 --method petra".split()
    assert main(words) == 2
    assert "methods compares runs of several --method; choose" in capsys.readouterr().err
    assert main(f"rate --out {tmp_path} --lr 0.1".split()) == 2
    assert "of several --lr" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_trainings_leave_measurements_in_their_file(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text('{"run": "rev_vit_small/1", "model": "rev_vit_small", "faster": 1.2}\n')
    words = f"methods --out {tmp_path} --epochs 0.1 {SMALL} --only store-64x2".split()
    assert main(words) == 0
    rows = [json.loads(line)["run"] for line in path.read_text().splitlines()]
    assert rows == ["rev_vit_small/1", "store-64x2"]
    path.write_text(path.read_text()[:-20])
    assert main(words) == 2
    assert "has a line that is no JSON" in capsys.readouterr().err


def test_some_runs_and_then_some_more(tmp_path, capsys):
    words = f"methods --out {tmp_path} --epochs 0.3 {SMALL} --only store-64x2".split()
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
    def stop(*args, **options):
        raise Stopped("stopped after 3 micro-batches and saved", tmp_path)

    monkeypatch.setattr("trainings.train", stop)
    assert main(f"latency --out {tmp_path}".split()) == 130
    assert "and saved; resume with the same command" in capsys.readouterr().err


@pytest.mark.parametrize("only", [(), ("rev_vit_small",)])
def test_measurements_write_rows_as_they_come(only, tmp_path, monkeypatch, capsys):
    words = ["overlap", "--out", str(tmp_path)]
    if not torch.cuda.is_available():
        assert main(words) == 2 and "overlap measures a GPU" in capsys.readouterr().err
    monkeypatch.setattr("redivider.train.machine.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(sweep, "_time", lambda model, batch, device: {"faster": 1.5})
    monkeypatch.setattr(sweep, "NAMES", ("rev_vit_small", "rev_mvit_base"))
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


def test_scripts_run_once_each_and_again_if_they_failed(tmp_path, monkeypatch, capfd):
    root, out = tmp_path / "root", tmp_path / "out"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "prints.py").write_text("import sys; print(sys.argv[1:])")
    (root / "benchmarks" / "writes.py").write_text(
        "import sys, pathlib\n"
        "path = pathlib.Path(sys.argv[2])\n"
        "text = path.read_text() if path.exists() else ''\n"
        "path.write_text(text + 'x')\n"
        "sys.exit(3 if len(text) < 1 else 0)\n"
    )
    monkeypatch.setattr(scripts, "ROOT", root)
    own = (Script("a", "prints.py --data {data}"), Script("b", "writes.py --out {out}"))
    claim = Claim("c", "a statement", scripts=own, on_gpu=False)
    monkeypatch.setattr("run.get_claim", lambda name: claim)
    monkeypatch.setenv("REDIVIDER_DATA", "/data")
    words = ["c", "--out", str(out)]
    assert main(words) == 2
    assert "benchmarks/writes.py ended with status 3" in capfd.readouterr().err
    assert (out / "a.json").read_text() == "['--data', '/data']\n"
    (out / "a.json").write_text("kept")
    assert main(words) == 0, "b goes on with what it had written"
    said = capfd.readouterr().out
    assert str(out / "a.json") in said and str(out / "b.json") in said
    assert (out / "a.json").read_text() == "kept" and (out / "b.json").read_text() == "xx"
    assert sorted(path.name for path in out.iterdir()) == ["a.json", "b.json"]
    assert main([*words, "--only", "b"]) == 0 and (out / "b.json").read_text() == "xx"
    assert "a.json" not in capfd.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU does")
def test_scripts_that_need_a_gpu_do_not_begin(tmp_path, capsys):
    assert main(["budget", "--out", str(tmp_path)]) == 2
    assert "budget measures a GPU, and there is none here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_scripts_of_claims_exist_and_have_these_options():
    for claim in CLAIMS:
        for script in claim.scripts:
            path = scripts.ROOT / "benchmarks" / script.words[0]
            text = path.read_text()
            options = [word for word in script.words[1:] if word.startswith("--")]
            assert all(f'"{option}"' in text for option in options), script
