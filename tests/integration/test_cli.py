"""The command line, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import redivider as rd
from redivider.cli import main

pytestmark = pytest.mark.slow


def test_models_prints_a_row_for_each_that_matches(capsys):
    assert main(["models", "revnet18", "*vit_tiny"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row[1:] for row in lines if len(row) == 5 and row[0] in rd.list_models()}
    assert list(rows) == ["revnet18", "vit_tiny", "rev_vit_tiny"]
    assert rows["revnet18"][:2] == ["12,215,912", "3.9"]
    assert rows["vit_tiny"][-1] == "-"
    stored, rebuilt = map(float, rows["rev_vit_tiny"][-2:])
    assert stored > 50 * rebuilt


def test_a_pattern_that_matches_nothing_lists_what_there_is(capsys):
    assert main(["models", "swan*"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "no model matches swan*" in said.err and "rev_vit_small" in said.err
    assert said.err.count("\n") == 1
    assert main(["models", "revnet18", "swan"]) == 2
    assert "no model matches swan;" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)  # `recipes` is a command without torch, whose import takes seconds
    command = [sys.executable, "-m", "redivider", "recipes"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_and_wrong_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "models" in capsys.readouterr().out
    for words in ([], ["models", "--x"], ["train", "--resume"], ["sample"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("redivider: ") and "--help" in said and said.count("\n") == 1


def test_names_that_are_nearly_right(capsys):
    for words, said in (
        (["modls"], "there is no command 'modls'; did you mean 'models'?"),
        (["recipes", "quikstart"], "no recipe matches quikstart; did you mean 'quickstart'?"),
        (["models", "revvit_small"], "did you mean 'rev_vit_small'?"),
        (["train", "quickstrt"], "did you mean 'quickstart'?"),
        (["zzz"], "`redivider --help` lists all"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_recipes_that_match(capsys):
    assert main(["recipes", "*-best", "quick"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[-1] == "quickstart" and all(name.endswith("-best") for name in names[:-1])
    assert len(names) == 4


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_about_a_recipe_lists_options_and_fields(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "quickstart", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for option in ("--out", "--resume", "--debug", "--epochs", "--method"):
        assert f" {option} " in out


def test_help_texts_are_sentences(capsys):
    runs = ("train", "evaluate", "sample", "export", "report")
    for command in (*runs, "recipes", "models", "plan-pipeline"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage, description, *_ = capsys.readouterr().out.split("\n\n")
        assert description[0].isupper() and description.endswith("."), usage


def test_the_beginning_of_a_name_is_enough(capsys):
    assert main(["models", "rev_gpt"]) == 0
    assert "rev_gpt_nano" in capsys.readouterr().out


def test_giants_take_no_memory(capsys):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["models", "rev_vit_giant"]) == 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500_000, f"its weights alone would take 4,056,000 KiB; it took {grown}"


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(("redivider 0.", "redivider 0+source"))


def test_it_runs_from_a_source_tree_that_is_not_installed():
    code = (
        "import sys; from importlib import metadata; sys.path.insert(0, sys.argv.pop())\n"
        "def none(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = none\n"
        "from redivider.cli import main; main(['--version'])"
    )
    source = Path(rd.__file__).parents[1]
    words = [sys.executable, "-c", code, str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "redivider 0+source\n"), done.stderr


def test_a_plan_is_a_table_a_picture_and_a_command(capsys, tmp_path):
    words = "plan-pipeline rev_vit_tiny --devices 4 --samples 64 --link-ms 20".split()
    assert main([*words, "--picture", str(tmp_path / "plan.svg")]) == 0
    table, picture, advice, command = capsys.readouterr().out.strip().split("\n\n")
    names = [line.split("  ")[0] for line in table.splitlines()]
    assert [name.partition(",")[0] for name in names] == [
        "method",
        "petra",
        "delayed-graph",
        "1F1B",
        "zero bubble",
    ]
    assert picture.startswith("stage 0  ")
    assert "224 x 224 pixels" in advice and "4 copies of the weights" in advice
    assert command.startswith("torchrun --nproc-per-node 4 -m redivider train RECIPE --model")
    assert "</svg>" in (tmp_path / "plan.svg").read_text()


def test_a_plan_names_machines_and_the_size_of_images(capsys):
    words = "plan-pipeline revnet18 --devices 4 --samples 64 --nodes 2 --image-size 32"
    assert main(words.split()) == 0
    table, _, advice, command = capsys.readouterr().out.strip().split("\n\n")
    assert "1F1B, data parallel  " in table and "No synchronous method" in advice
    assert "32 x 32 pixels" in advice and command.endswith("--model-options image_size 32")
    assert command.startswith("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400")
    assert "--nproc-per-node 2 " in command


def test_a_plan_that_cannot_be_kept_says_so(capsys):
    words = "plan-pipeline rev_vit_tiny --devices 4 --samples 64"
    for more, text in (
        ("--memory 1MiB", "on 4 devices of 0.000977 GiB; allow more memory or delay"),
        ("--memory 0", "--memory: memory must be from 1 byte"),
        ("--memory 4GB+", "--memory: memory is a whole number of bytes"),
        ("--link-ms -5", "--link-ms must be at least 0"),
        ("--link-ms nan", "--link-ms must be at least 0"),
        ("--overhead-us inf", "--overhead-us must be at least 0"),
        ("--overhead-us -100000", "--overhead-us must be at least 0"),
        ("--max-late nan", "--max-late must be at least 0"),
        ("--bandwidth inf", "--bandwidth must be above 0"),
        ("--picture x.foo", "--picture: x.foo must end in one of"),
        ("--picture none/x.svg", "there is no folder none"),
        ("--nodes 3", "--devices 4 is no multiple of --nodes 3"),
        ("--image-size 225", "image_size 225 is not divisible"),
    ):
        assert main([*words.split(), *more.split()]) == 2
        out, err = capsys.readouterr()
        assert text in err and not out
    assert main(["plan-pipeline", "rev_vit_tinny", "--devices", "4", "--samples", "64"]) == 2
    assert "did you mean 'rev_vit_tiny'?" in capsys.readouterr().err
    assert main(["plan-pipeline", "swan", "--devices", "4", "--samples", "64"]) == 2
    assert "there is no model 'swan'" in capsys.readouterr().err
