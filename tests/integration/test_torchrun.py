"""`redivider train` under torchrun equals a run in one process, whatever happens to its ranks."""

import os
from pathlib import Path

import pytest
from support.processes.launch import launch
from support.processes.torchrun import (
    equal,
    kill_one,
    run_forked,
    run_ranks,
    small,
    train_apart,
)
from support.training import rows

from redivider.train.compare import compare
from redivider.train.errors import SharedError, TrainError
from redivider.train.loop import train

pytestmark = pytest.mark.slow

NUM_RUNS = int(os.environ.get("REDIVIDER_STRESS", "0"))


@pytest.fixture
def asked(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("recipe.json").write_text(small().to_json())
    return "recipe.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return the folder of a run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    train_apart(small(), folder / "run")
    return folder / "run"


@pytest.mark.skipif(not NUM_RUNS, reason="make stress kills ranks at random")
@pytest.mark.parametrize("number", range(max(NUM_RUNS, 1)))
def test_a_rank_is_killed_and_all_go_on(number, whole, asked):
    kill_one(number, asked, whole)


def test_a_rank_is_killed_then_all_are_stopped_and_go_on_in_another_number(asked, tmp_path):
    """Under one torchrun, whose processes are forked: each would import torch.

    Ranks agree to stop about once a second: here at most 111 steps after the last start.
    """
    num_steps = 178
    train_apart(small(epochs=2.0, save_minutes=60.0), tmp_path / "whole")
    words = ("train", asked, "--epochs", "2", "--out", "run")
    group, said = run_forked(2, *words, victim="1:40", stop="1:60:1", restarts=3)
    assert Path("killed").exists(), said
    assert "and saved; resume it by: redivider train --resume run" in said, said
    assert said.count("and saved") == 1  # one of them speaks
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)  # none of them is left
    assert 60 <= last_step() < num_steps
    codes, said = run_ranks(3, "train", "--resume", "run")
    assert codes == [0] * 3, said
    assert rows(Path("run"))[-1]["step"] == num_steps
    assert equal(Path("run"), tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_whose_memory_is_full_says_so(rank, asked):
    _, said = run_ranks(2, "train", asked, "--out", "run", full=f"{rank}:9")
    lines = [line for line in said.splitlines() if line.startswith("redivider: ")]
    assert len(lines) == 1, said
    much = f"{2**40:,} MiB"
    assert lines[0].startswith(f"redivider: no memory is left on cpu for {much}, in stage"), said


def last_step() -> int:
    paths = Path("run/checkpoints").glob("s*")
    return max(int(path.name.removeprefix("step-")) for path in paths)


def test_replicas(asked):
    words = ("--out", "run", "--replicas", "2", "--stages", "2")
    codes, said = run_ranks(4, "train", asked, *words)
    assert codes == [0] * 4, said
    lines = rows(Path("run"))
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["step"] == 44  # half of 89 micro-batches, for each replica


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"method": "reverse"}, "reverse runs in one process; use a pipeline's method"),
        ({"probe_every": 5}, "a probe needs the whole network in one process"),
    ],
)
def test_what_cannot_be_spread(changes, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SharedError, match=reason) as caught:
        train(small(**changes), tmp_path / "run")
    assert not caught.value.is_first and not (tmp_path / "run").exists()


def test_a_comparison_runs_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainError, match="a comparison runs in one process"):
        compare(small(compare=("store", "petra")), tmp_path / "run")


def test_replicas_need_processes(tmp_path):
    with pytest.raises(TrainError, match="2 replicas need as many processes"):
        train(small(replicas=2), tmp_path / "run")


def test_an_attempt_goes_on_in_the_folder_of_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    train(small(epochs=0.1), tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    train(small(epochs=0.1), tmp_path / "run", numbered=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(small(epochs=0.1), tmp_path / "run", numbered=True).folder.name == "run-2"
    with pytest.raises(TrainError, match="exists; choose another folder"):
        train(small(epochs=0.1), tmp_path / "run")  # which is not this one's


def test_what_does_not_fit(tmp_path):
    for said in launch(_do_not_fit, tmp_path, world_size=3):
        assert said[0] == "3 processes cannot be 2 replicas of a pipeline"
        assert said[1].startswith("2 stages cannot be spread over 3 processes; start 2 or fewer")


def _do_not_fit(rank):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    said = []
    for changes in ({"replicas": 2}, {"stages": 2}):
        try:
            train(small(**changes), Path("nowhere"))
        except TrainError as error:
            said.append(str(error))
    return said
