"""A rank that fails ends all ranks within seconds, with the reason; nothing hangs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.processes.cases import equal, finish, model, options, run
from support.processes.failures import (
    CASES,
    exits,
    exits_while_others_load,
    is_stopped,
    meet,
    raises,
    sleeps_unread,
)
from support.processes.launch import launch, rank_env
from torch.distributed import TCPStore

import redivider as rd
from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.runners.heartbeat import FAILURE
from redivider.pipeline.runners.pending import BEAT
from redivider.pipeline.runners.topology import Team

pytestmark = pytest.mark.slow


ON_A_DEVICE = [raises, exits, exits_while_others_load, sleeps_unread, is_stopped]
ON_A_HOST = [case for case in CASES if case not in (sleeps_unread, exits_while_others_load)]


@pytest.mark.parametrize("case", ON_A_HOST, ids=lambda case: case.__name__)
def test_all_ranks_end(case, tmp_path):
    meet(case, tmp_path)


@pytest.mark.parametrize("case", ON_A_DEVICE, ids=lambda case: case.__name__)
def test_all_ranks_end_whose_devices_wait(case, tmp_path):
    meet(case, tmp_path, "device")


LEAVING = """
from datetime import timedelta
from redivider.pipeline.runners import heartbeat as watch
import redivider as rd
from support.processes.cases import model, options

def beat(board):
    try:
        board._store.wait(["nothing"], timedelta(milliseconds=300))
    except RuntimeError:
        pass

watch.BEAT, watch._Board.beat = 0.001, beat
pipe = rd.DistributedPipeline(model(), **options())
"""


def test_a_process_ends_in_peace_while_its_thread_talks_to_the_store():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    env = os.environ | rank_env(0, 1, store.port) | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", LEAVING], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def save_in_vain(rank, folder):
    pipe = rd.DistributedPipeline(model(), **options())
    run(pipe, 0, 6)
    with pytest.raises(StateError, match="holds no state"):
        pipe.save(folder)
    assert not pipe.team._store.check([FAILURE])  # nobody has failed
    run(pipe, 6, 12)
    finish(pipe)
    return pipe.full_state_dict()


def test_all_ranks_continue_after_an_error_that_all_of_them_raise(tmp_path):
    (tmp_path / "notes").mkdir()
    weights, others = launch(save_in_vain, tmp_path, tmp_path / "notes")
    assert equal(weights, others)
    assert not list((tmp_path / "notes").iterdir())


def raise_alike(rank):
    """Raise what the other rank raises; the second one has heard of it before."""
    team = Team(None, torch.device("cpu"), 60.0)
    try:
        with team.guarding():
            while rank == 1 and team.watch.heard is None:
                time.sleep(0.01)
            raise ValueError("all have this")
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        team.watch.close()


def test_an_error_of_all_is_raised_as_it_is_whoever_reports_it_first(tmp_path):
    assert launch(raise_alike, tmp_path) == [("ValueError", "all have this")] * 2


def raise_in_other_words(rank):
    """Raise an error on one rank, whose thread hears of it before the process goes on."""
    team = Team(None, torch.device("cpu"), 60.0)
    fail = team.watch.fail

    def wait_until_heard():
        while team.watch.heard is None:
            time.sleep(0.01)

    def fail_late():
        wait_until_heard()
        fail()

    team.watch.fail = fail_late  # type: ignore[method-assign]
    try:
        with team.guarding():
            try:
                with team.guarding():
                    if rank == 0:
                        raise KeyError("terse")
                    wait_until_heard()
            except KeyError as error:
                raise ValueError("in plain words") from error
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        team.watch.close()


def test_an_error_that_is_known_may_be_said_in_other_words(tmp_path):
    ours, theirs = launch(raise_in_other_words, tmp_path)
    assert ours == ("ValueError", "in plain words")
    assert theirs == ("PipelineError", "rank 0: KeyError: 'terse'")


def test_stages_that_do_not_fit(tmp_path):
    messages = launch(_too_many, tmp_path, world_size=3)
    assert all("2 stages cannot be spread over 3 processes" in message for message in messages)


def _too_many(rank):
    try:
        rd.DistributedPipeline(model(), stages=2, **options())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("backend", ["gloo", "device"])
def test_a_pipeline_that_cannot_be_built_leaves_the_others_usable(backend, tmp_path):
    losses = launch(_build_twice, tmp_path, world_size=3, backend=backend)
    assert len(losses[-1]) == 2 and not losses[0]  # the losses are on the last rank


def _build_twice(rank):
    message = "2 stages cannot be spread over 3 processes"
    with pytest.raises((ValueError, rd.PipelineError), match=message):  # its own, or another rank's
        rd.DistributedPipeline(model(), stages=2, **options())
    time.sleep(3 * BEAT)  # until its thread has heard of the error, if it still listens
    pipe = rd.DistributedPipeline(model(), stages=3, **options())
    losses = run(pipe, 0, 4)
    pipe.close()
    return losses


def test_ranks_that_disagree(tmp_path):
    for name, (first, second), said in (
        ("accumulate", (1, 2), "2 and not 1"),
        ("lr_by_delay", (False, True), "True and not False"),
    ):
        messages = launch(_disagree, tmp_path / name, name, first, second)
        expected = f"rank 1 was given another {name} than rank 0: {said}"
        assert all(expected in message for message in messages)


def _disagree(rank, name, *values):
    try:
        rd.DistributedPipeline(model(), **{name: values[rank]}, **options())
    except (ValueError, rd.PipelineError) as error:
        return str(error)
