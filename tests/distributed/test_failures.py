"""A rank that fails ends all of them, in seconds and with the reason; nothing hangs."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from patience import seconds
from torch.distributed import TCPStore
from workers import end, start

import redivider as rd
from distributed.cases import model, options, run
from distributed.launch import launch, rank_env

pytestmark = pytest.mark.slow

SECONDS = 60  # until all have ended
TIMEOUT = round(seconds(2))  # of a pipeline: a rank that is only slow is waited for


def raises(pipe):
    pipe._chain[0].f.register_forward_pre_hook(_break)


def _break(module, args):
    raise ArithmeticError("the moon is in the wrong place")


def exits(pipe):
    os._exit(7)


def is_killed(pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(pipe):
    pipe._chain[0].f.register_forward_pre_hook(lambda *_: time.sleep(10 * SECONDS))


def is_stopped(pipe):
    os.kill(os.getpid(), signal.SIGSTOP)


def changes_shape(pipe):
    run(pipe, 6, 40, size=3)


def lacks_inputs(pipe):
    for _ in range(40):
        pipe.step()


def saves_nowhere(pipe):
    Path("there").write_text("a file, and no folder")
    pipe.save("there/state")


CASES = {
    raises: "ArithmeticError: the moon is in the wrong place",
    exits: r"the connection to rank 2 \(stage 2\) has broken",
    is_killed: r"the connection to rank 0 \(stage 0\) has broken|rank 0 or its torchrun holds",
    sleeps: rf"rank 1 \(stage 1\): in tick 6, was waited for {TIMEOUT} s",
    is_stopped: rf"rank 1 \(stage 1\): gives no sign of life, and was waited for {TIMEOUT} s",
    changes_shape: r"messages are \[3, 6, 8\] float32, .* now, and were \[4, 6, 8\] float32",
    lacks_inputs: "first rank of a column needs the inputs",
    saves_nowhere: "there",
}
VICTIMS = {raises: 1, exits: 2, is_killed: 0, sleeps: 1, is_stopped: 1}  # of the others, all
CULPRITS = {raises: 1, changes_shape: 0, lacks_inputs: 0}


def work(case, rank: int) -> None:
    """Train, meet the case if it is this rank's, and train on."""
    pipe = rd.DistributedPipeline(model(), timeout=TIMEOUT, **options())
    run(pipe, 0, 6)
    if VICTIMS.get(case, rank) == rank:
        case(pipe)
    run(pipe, 6, 40)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_ranks_end(case, tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True)  # as torchrun's
    processes = [
        start(
            work,
            case,
            rank,
            folder=tmp_path,
            output=tmp_path / f"{rank}.txt",
            env=rank_env(rank, 3, store.port),
        )
        for rank in range(3)
    ]
    stopped = {1} if case is is_stopped else set()
    try:
        others = [each for rank, each in enumerate(processes) if rank not in stopped]
        assert not end(others, seconds(SECONDS)), "they hang"
        assert all(each.exitcode != 0 for each in others)
    finally:
        end(processes, 0)
    silent = {exits: {2}, is_killed: {0}}.get(case, set()) | stopped
    for rank in {0, 1, 2} - silent:
        said = (tmp_path / f"{rank}.txt").read_text()
        assert re.search(CASES[case], said), f"rank {rank}: {said}"
        culprit = CULPRITS.get(case, rank)
        if rank != culprit:  # which raises its own error
            assert f"rank {culprit} (stage {culprit}): " in said, f"rank {rank}: {said}"


def test_stages_that_do_not_fit(tmp_path):
    found = launch(_too_many, tmp_path, world_size=3)
    assert all("2 stages cannot be spread over 3 processes" in each for each in found)


def _too_many(rank):
    try:
        rd.DistributedPipeline(model(), stages=2, **options())
    except ValueError as error:
        return str(error)


def test_ranks_that_disagree(tmp_path):
    for name, (first, second), said in (
        ("accumulate", (1, 2), "2 and not 1"),
        ("lr_by_delay", (False, True), "True and not False"),
    ):
        found = launch(_disagree, tmp_path / name, name, first, second)
        message = f"rank 1 was given another {name} than rank 0: {said}"
        assert all(message in each for each in found)


def _disagree(rank, name, *values):
    try:
        rd.DistributedPipeline(model(), **{name: values[rank]}, **options())
    except (ValueError, rd.PipelineError) as error:
        return str(error)
