"""The commands as a user gives them: signals, full disks, bad input."""

import errno
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import workers
from support.patience import seconds
from support.training import (
    hide,
    limit_files,
    print_to,
    recipe,
    rows,
    run_command,
    send_signal,
    start_command,
    stop_in_evaluation,
)

from redivider.cli import main
from redivider.train.compare import variants
from redivider.train.errors import TrainError
from redivider.train.run_folder import writing

pytestmark = pytest.mark.slow

RECIPE = Path("recipe.json")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIVIDER_DATA", str(tmp_path / "data"))
    (tmp_path / RECIPE).write_text(recipe(method="petra", save_minutes=0).to_json())


def is_one_line(said, what):
    """Return whether a command ended with one line that says what is wrong."""
    lines = [line for line in said.splitlines() if line.startswith("redivider: ")]
    return len(lines) == 1 and what in lines[0] and "Traceback" not in said


def forget_the_end(folder):
    """Remove the end of a log, as if the run had been killed just before."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"kind": "end"' not in line]
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in kept))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return a run that nothing happened to, in a process of its own."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        RECIPE.write_text(recipe(method="petra", save_minutes=0).to_json())
        code, said = run_command("train", "recipe.json", "--out", "run")
    assert code == 0, said
    return folder / "run"


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_signals_lose_nothing(how, whole):
    code, said = run_command(
        "train", "recipe.json", "--out", "parts", prepare=(send_signal, how, 27)
    )
    if how == "SIGKILL":
        assert code == -signal.SIGKILL
    else:
        assert code == 130, said
        assert "resume it by: redivider train --resume parts" in said and "Traceback" not in said
    assert not rows(Path("parts"), "end")
    with open("parts/log.jsonl", "a") as log:
        log.write('{"kind": "tra')  # as a process that is killed may leave it
    code, said = run_command("train", "--resume", "parts")
    assert code == 0, said
    for kind in ("train", "evaluate", "end"):
        assert rows(Path("parts"), kind) == rows(whole, kind)
    ours, theirs = (load_file(run / "model.safetensors") for run in (Path("parts"), whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(list(Path("parts/checkpoints").iterdir())) == 2


def test_a_full_disk_loses_no_checkpoint(capsys):
    """A limit on the size of files stands for the disk: writes fail in the middle."""
    words = "train recipe.json --out run --epochs 0.2 --model-options width 24"
    assert main(words.split()) == 0
    kept = sorted(Path("run/checkpoints").iterdir())
    size = max(path.stat().st_size for path in kept[-1].iterdir())
    shutil.copytree("run", "full")
    stated = json.loads(Path("run/recipe.json").read_text())
    Path("full/recipe.json").write_text(json.dumps({**stated, "epochs": 0.4}))
    forget_the_end(Path("full"))
    code, said = run_command("train", "--resume", "full", prepare=(limit_files, size // 2))
    assert code == 2, said
    assert is_one_line(said, "make room")
    assert "warning: cannot write a checkpoint" in said  # training went on until the end
    paths = sorted(Path("full/checkpoints").iterdir())
    assert [path.name for path in paths] == [path.name for path in kept]
    assert main(["train", "--resume", "full"]) == 0


def test_what_a_full_disk_stops_says_so_and_leaves_what_was_there():
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.1"]) == 0
    assert main(["report", "run", "--out", "page.html"]) == 0
    page = Path("page.html").read_bytes()
    for words in ("train recipe.json --out other", "report run --out page.html"):
        code, said = run_command(*words.split(), prepare=(limit_files, 1000))
        assert code == 2, said
        assert is_one_line(said, "make room")
        assert Path("page.html").read_bytes() == page
        assert not list(Path().glob(".page*"))


def test_a_damaged_checkpoint_is_passed_over(capsys, caplog):
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.5"]) == 0
    whole = rows(Path("run"))
    forget_the_end(Path("run"))
    before, last = sorted(Path("run/checkpoints").iterdir())
    victim = next(last.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-7])
    assert main(["train", "--resume", "run"]) == 0
    assert f"{victim.name} is damaged" in caplog.text
    assert rows(Path("run")) == whole
    assert rows(Path("run"), "end")
    forget_the_end(Path("run"))
    for path in Path("run/checkpoints").iterdir():
        (path / "manifest.json").write_text("{}")
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
        ("train recipe.json --model-options width", "takes names and values"),
        ("train recipe.json --stages four", "--stages: takes INT|{[INT [INT ...]]}|{auto}, got"),
        ("train recipe.json --epochs -1", "redivider: epochs must be"),
        ("train revnet18-cifar100-petra --device cuda", "use --device cpu"),
        ("train recipe.json --device tpu9", "no device 'tpu9'"),
        ("train recipe.json --data imagenet32", "imagenet32"),
        ("train recipe.json --data digit", "did you mean 'digits'?"),
        ("train recipe.json --model revnet", "no model 'revnet'"),
        ("train recipe.json --model-options breadth 3", "no option 'breadth'"),
        ("train recipe.json --stages 9", "4 units cannot be cut into 9 stages"),
        ("train recipe.json --microbatch 5000", "choose a smaller batch"),
        ("train --resume nowhere", "there is no run in nowhere"),
        ("train --resume x --out y", "--resume takes the run as it is"),
        ("train --resume x --lr 0.3", "--resume takes the run as it is"),
        ("report nowhere", "there is no run in nowhere"),
        ("compare recipe.json --compare peta", "did you mean 'petra'?"),
        ("train recipe.json --method revers", "did you mean 'reverse'?"),
        ("compare recipe.json --compare store store", "names a method twice: store, store"),
        ("compare quickstart --method store", "a comparison is by --compare METHOD"),
        ("train recipe.json --compare store petra --stages 9", "cut into 9 stages"),
        ("train --seed 1 recipe.json", "the name comes first"),
        ("train recipe.json --out recipe.json", "recipe.json exists; choose another folder"),
        ("train recipe.json --out recipe.json/x", "cannot write to recipe.json/x"),
        ("train recipe.json --name ../x", "name must be words"),
        ("train recipe.json --label-smoothing 2", "label_smoothing must be 0 or more"),
        ("train recipe.json --epochs inf", "epochs must be above 0 and at most"),
        ("train recipe.json --seed 99999999999999999999999", "seed must be"),
        ("train recipe.json --model-options num_classes 3", "may not have num_classes"),
        ("train recipe.json --device meta", "no device 'meta'"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("redivider: ") and err.count("\n") == 1
    assert not Path("runs").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["recipe.json"]


def test_bad_fields_of_a_file(capsys):
    good = json.loads(RECIPE.read_text())
    for wrong in ({"betas": ["a", "b"]}, {"milestones": [float("nan")]}, {"clip_norm": -1}):
        RECIPE.write_text(json.dumps({**good, **wrong}))
        assert main(["train", "recipe.json"]) == 2
        assert next(iter(wrong)) in capsys.readouterr().err


def test_pages_that_cannot_be_written(capsys):
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.1"]) == 0
    for out in ("run", "recipe.json/x.html"):
        assert main(["report", "run", "--out", out]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_reader_that_leaves_does_not_stop_a_run():
    os.mkfifo("pipe")
    words, said = "train recipe.json --epochs 0.2 --out run", Path("said.txt")
    process = start_command(*words.split(), output=said, prepare=(print_to, "pipe"))
    with open("pipe", "rb", buffering=0) as pipe:
        assert pipe.read(1)
    assert not workers.end([process], seconds(60))
    assert process.exitcode == 0 and "Traceback" not in said.read_text()
    assert rows(Path("run"), "end")


def test_two_at_once_take_two_folders():
    words = "train recipe.json --epochs 0.1 --seed".split()
    both = [start_command(*words, seed, output=Path(f"{seed}.txt")) for seed in (1, 2)]
    assert not workers.end(both, seconds(60))
    assert [process.exitcode for process in both] == [0, 0]
    seeds = {json.loads(path.read_text())["seed"] for path in Path("runs").glob("*/recipe.json")}
    assert seeds == {1, 2}


def test_a_run_is_no_comparison(capsys):
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.1"]) == 0
    before = Path("run/recipe.json").read_text()
    assert main(["compare", "--resume", "run"]) == 2
    assert "is no comparison" in capsys.readouterr().err
    assert Path("run/recipe.json").read_text() == before


def test_a_run_is_no_recipe(capsys):
    assert main("train recipe.json --out some --epochs 0.1".split()) == 0
    assert main(["train", "some"]) == 2
    said = capsys.readouterr().err
    assert "train --resume some` resumes" in said and "train some/recipe.json` starts" in said


def test_a_run_is_not_written_over(capsys):
    assert main(["train", "recipe.json", "--out", "run", "--epochs", "0.1"]) == 0
    assert main(["train", "recipe.json", "--out", "run"]) == 2
    assert "already holds a run; `redivider train --resume" in capsys.readouterr().err
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


def test_comparisons_are_captured_and_probed_pipelines_once_more_without_the_probe():
    config = recipe(compare=("store", "petra"), device="cuda", probe_every=50)
    runs = variants(config)
    assert [name for name, _ in runs] == ["store", "petra", "petra, captured"]
    assert all(variant.capture for _, variant in runs)
    assert [variant.probe_every for _, variant in runs] == [50, 50, 0]
    for other in ({"probe_every": 0}, {"capture": False}, {"device": "cpu"}):
        assert [name for name, _ in variants(replace(config, **other))] == ["store", "petra"]


def test_compare_and_report(capsys):
    words = "compare recipe.json --epochs 0.2 --compare store petra --compare-depths 1 2 4 --out c"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    table = out[out.index("method  ") :].splitlines()
    assert table[0].split()[:4] == ["method", "accuracy", "seconds", "activations"]
    assert [line.split()[0] for line in table[1:3]] == ["store", "petra"]
    for method in ("store", "petra"):  # nothing that takes long is silent
        for depth in (1, 2, 4):
            line = rf"^small, {method}: [\d.]+ MiB of activations at depth {depth}$"
            assert re.search(line, out, re.MULTILINE)
    assert out.splitlines()[-1] == "open in a browser: c/report.html"
    page = Path("c/report.html").read_text()
    assert "small, store" in page and "small, petra" in page
    assert main(["report", "c/petra", "c/store", "--out", "other.html"]) == 0
    assert "<svg" in Path("other.html").read_text()
    assert main(["report", "c/petra"]) == 0 and Path("c/petra/report.html").exists()
    Path("c/report.html").unlink()
    assert main(["report", "c"]) == 0
    assert "small, store" in Path("c/report.html").read_text()
    assert "0.00" not in "".join(table[1:3])


def test_a_comparison_that_was_stopped_goes_on():
    words = "train recipe.json --epochs 0.25".split()
    for method in ("store", "petra"):  # in processes, too: what a process did before may show
        code, said = run_command(*words, "--method", method, "--out", f"whole/{method}")
        assert code == 0, said
    words += "--compare store petra --out parts".split()
    code, said = run_command(*words, prepare=(send_signal, "SIGINT", 24 + 12))
    assert code == 130 and "--resume parts" in said
    assert rows(Path("parts/store"), "end") and not rows(Path("parts/petra"), "end")
    code, said = run_command("train", "--resume", "parts")
    assert code == 0, said
    for method in ("store", "petra"):
        assert rows(Path("parts") / method) == rows(Path("whole") / method)
    assert Path("parts/report.html").exists()


@pytest.mark.parametrize("module", ["tqdm", "safetensors", "numpy"])
def test_what_is_not_installed_is_said_before_anything_is_done(module):
    words = ("train", "recipe.json", "--out", "never")
    code, said = run_command(*words, prepare=(hide, module))
    assert code == 2 and not Path("never").exists()
    assert said == f'redivider: training needs {module}; pip install "redivider[train]"\n'


def test_a_folder_that_cannot_be_made_is_not_said_to_be_full(capsys):
    assert main(["train", "recipe.json", "--out", "recipe.json/x"]) == 2
    err = capsys.readouterr().err
    assert "cannot write to recipe.json/x" in err and err.endswith("; choose another folder\n")
    for error in (OSError(errno.ENOSPC, "No space"), OSError("safetensors does not tell which")):
        with pytest.raises(TrainError, match="make room there"), writing(Path("full")):
            raise error


def test_a_comparison_stopped_when_a_run_had_all_but_ended_goes_on(monkeypatch, capsys):
    words = "train recipe.json --epochs 0.1 --evaluate-every 1 --compare store reverse --out parts"
    stop_in_evaluation(monkeypatch)
    assert main(words.split()) == 130
    err = capsys.readouterr().err
    assert (
        "stopped after store, which has ended; resume it by: redivider train --resume parts" in err
    )
    assert rows(Path("parts/store"), "end") and not Path("parts/reverse").exists()
    assert main(["train", "--resume", "parts"]) == 0
    assert rows(Path("parts/reverse"), "end") and Path("parts/report.html").exists()


def test_a_terminal_sees_a_progress_bar():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    words = ("train", "recipe.json", "--epochs", "0.3")
    process = start_command(*words, output=Path(os.ttyname(theirs)))
    seen = b""
    while process.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            seen += os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    assert process.exitcode == 0
    text = seen.decode()
    for word in ("small, petra:", "loss=", "accuracy=", "memory=", "sample/s", "<", "MiB"):
        assert word in text


def test_help_comes_without_torch():
    code = "import sys, redivider.cli as c\ntry: c.main({})\nexcept SystemExit: pass\n"
    for words in (
        ["--help"],
        ["train", "--help"],
        ["recipes"],
        ["train", "quickstart", "--help"],
        ["evaluate", "--help"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words) + "assert 'torch' not in sys.modules"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
