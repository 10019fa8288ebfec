"""The commands as a user gives them: signals, full disks, bad input."""

import fcntl
import json
import os
import pty
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from redivider.cli import main
from train.small import command, recipe, rows

RECIPE = Path("recipe.json")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIVIDER_DATA", str(tmp_path / "data"))
    (tmp_path / RECIPE).write_text(recipe(method="petra", epochs=3, save_minutes=0).to_json())


def wait_for_line(folder, step, process):
    """Until a run has written of so many micro-batches."""
    log = Path(folder) / "log.jsonl"
    for _ in range(600):
        if log.exists() and f'"step": {step},' in log.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it never got there")


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_signals_lose_nothing(how, capsys):
    assert main(["train", "recipe.json", "--out", "whole"]) == 0
    process = command("train", "recipe.json", "--out", "parts")
    wait_for_line("parts", 100, process)
    process.send_signal(getattr(signal, how))
    _, err = process.communicate(timeout=60)
    if how == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, err
        assert "go on with: redivider train --resume parts" in err and "Traceback" not in err
    assert not rows(Path("parts"), "end")
    with open("parts/log.jsonl", "a") as log:
        log.write('{"kind": "tra')  # as a process that is killed may leave it
    assert main(["train", "--resume", "parts"]) == 0
    for kind in ("train", "evaluate", "end"):
        assert rows(Path("parts"), kind) == rows(Path("whole"), kind)
    ours, theirs = (load_file(f"{each}/model.safetensors") for each in ("parts", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(list(Path("parts/checkpoints").iterdir())) == 2


def test_a_full_disk_loses_no_checkpoint(capsys):
    """A limit on the size of files stands for the disk: writes fail in the middle."""
    words = "train recipe.json --out run --epochs 0.3 --model-options width 24"
    assert main(words.split()) == 0
    kept = sorted(Path("run/checkpoints").iterdir())
    size = max(path.stat().st_size for path in kept[-1].iterdir())
    shutil.copytree("run", "full")
    stated = json.loads(Path("run/recipe.json").read_text())
    Path("full/recipe.json").write_text(json.dumps({**stated, "epochs": 1.0}))
    lines = Path("full/log.jsonl").read_text().splitlines()
    Path("full/log.jsonl").write_text("\n".join(x for x in lines if '"end"' not in x) + "\n")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    process = command("train", "--resume", "full", preexec_fn=limit)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert "make room" in err and err.count("\n") == 1 and "Traceback" not in err
    assert "warning: cannot write a checkpoint" in out  # training went on until the end
    found = sorted(Path("full/checkpoints").iterdir())
    assert [each.name for each in found] == [each.name for each in kept]
    assert main(["train", "--resume", "full"]) == 0


def test_a_damaged_checkpoint_is_passed_over(capsys, caplog):
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.5"]) == 0
    whole = rows(Path("run"))
    before, last = sorted(Path("run/checkpoints").iterdir())
    victim = next(last.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-7])
    assert main(["train", "--resume", "run"]) == 0
    assert f"{victim.name} is damaged" in caplog.text
    assert rows(Path("run")) == whole
    for each in Path("run/checkpoints").iterdir():
        (each / "manifest.json").write_text("{}")
    assert main(["train", "--resume", "run"]) == 2
    assert "are damaged; train anew" in capsys.readouterr().err
    assert before.exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ("train quickstrt", "no recipe 'quickstrt'; did you mean 'quickstart'?"),
        ("train quickstart --epocs 3", "no field --epocs; did you mean epochs?"),
        ("train quickstart --epochs x", "--epochs"),
        ("train none.json", "cannot read none.json"),
        ("train", "which recipe?"),
        ("train revnet18-cifar100-petra --device cuda", "take --device cpu"),
        ("train recipe.json --device tpu9", "no device 'tpu9'"),
        ("train recipe.json --data imagenet32", "imagenet32"),
        ("train recipe.json --data digit", "did you mean 'digits'?"),
        ("train recipe.json --model revnet", "no model 'revnet'"),
        ("train recipe.json --model-options breadth 3", "no option 'breadth'"),
        ("train recipe.json --stages 9", "4 units cannot be cut into 9 stages"),
        ("train recipe.json --microbatch 5000", "take a smaller batch"),
        ("train --resume nowhere", "cannot read nowhere/recipe.json"),
        ("train --resume x --out y", "--resume takes the run as it is"),
        ("report nowhere", "cannot read nowhere/recipe.json"),
        ("compare recipe.json --compare peta", "peta"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("redivider: ") and err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_run_is_not_written_over(capsys):
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.1"]) == 0
    assert main(["train", "recipe.json", "--out", "run"]) == 2
    assert "holds a run already; go on with it by" in capsys.readouterr().err
    for folder in ("runs/small", "runs/small-2"):
        assert main(["train", "recipe.json", "--epochs", "0.1"]) == 0
        assert Path(folder, "model.safetensors").exists()


def test_debug_shows_where_it_came_from():
    with pytest.raises(ValueError, match="quickstrt"):
        main(["train", "quickstrt", "--debug"])


def test_a_resolved_recipe_can_be_given_back():
    assert main(["train", "recipe.json", "--out", "a", "--epochs", "0.2", "--seed", "3"]) == 0
    assert main(["train", "a/recipe.json", "--out", "b"]) == 0
    assert rows(Path("a")) == rows(Path("b"))


def test_compare_and_report(capsys):
    words = "compare recipe.json --epochs 0.3 --compare store petra --compare-depths 2 4 --out c"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    table = out[out.index("method  ") :].splitlines()
    assert table[0].split()[:4] == ["method", "accuracy", "seconds", "activations"]
    assert [line.split()[0] for line in table[1:3]] == ["store", "petra"]
    assert out.rstrip().endswith("c/report.html")
    page = Path("c/report.html").read_text()
    assert "small, store" in page and "small, petra" in page
    assert main(["report", "c/petra", "c/store", "--out", "other.html"]) == 0
    assert "<svg" in Path("other.html").read_text()
    assert main(["report", "c/petra"]) == 0 and Path("c/petra/report.html").exists()


def test_a_comparison_that_was_stopped_goes_on(capsys):
    words = "train recipe.json --epochs 2 --compare store petra --out"
    assert main([*words.split(), "whole"]) == 0
    process = command(*words.split(), "parts")
    wait_for_line("parts/petra", 50, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume parts" in err
    assert main(["train", "--resume", "parts"]) == 0
    for method in ("store", "petra"):
        assert rows(Path("parts") / method) == rows(Path("whole") / method)
    assert Path("parts/report.html").exists()


def test_a_terminal_sees_a_progress_bar():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    words = [sys.executable, "-m", "redivider", "train", "recipe.json", "--epochs", "1"]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            seen += os.read(ours, 65536)
        except OSError:
            break
    os.close(ours)
    assert process.wait() == 0
    text = seen.decode()
    for word in ("small, petra:", "loss=", "accuracy=", "memory=", "sample/s", "<", "MiB"):
        assert word in text


def test_help_comes_without_torch():
    code = "import sys, redivider.cli as c\ntry: c.main({})\nexcept SystemExit: pass\n"
    for words in (["--help"], ["train", "--help"], ["recipes"], ["train", "quickstart", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words) + "assert 'torch' not in sys.modules"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
