"""Failures of a rank, and the errors that all other ranks must report."""

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import redivider as rd
from redivider.pipeline.runners import process_group
from support.patience import seconds
from support.processes import cases, ordered
from support.processes.cases import batch, model, options, run
from support.processes.launch import nccl_env, rank_env
from support.workers import end, start

SECONDS = 60  # until all have ended
TIMEOUT = round(seconds(2))  # of a pipeline, in cases that end by it


def raises(pipe):
    pipe._chain[0].f.register_forward_pre_hook(_break)


def _break(module, args):
    raise ArithmeticError("the moon is in the wrong place")


def exits(pipe):
    os._exit(7)


def exits_while_others_load(pipe):
    """Exit, while the others launch a kernel for the first time, which waits for their devices."""
    os._exit(7)


def load_kernel() -> None:
    if cases.DEVICE == "cpu":
        group: Any = dist.group.WORLD
        group.load_kernel()
    else:
        torch.erfinv(torch.zeros(1, device=cases.DEVICE))  # no network of ours uses it


def is_killed(pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(pipe):
    pipe._chain[0].f.register_forward_pre_hook(lambda *_: time.sleep(10 * SECONDS))


def sleeps_unread(pipe):
    """Sleep, while the others read their losses and so wait for their devices."""
    sleeps(pipe)


def is_stopped(pipe):
    os.kill(os.getpid(), signal.SIGSTOP)


def changes_shape(pipe):
    """Only on the first rank: with a target of another size the last one might fail before it."""
    run(pipe, 6, 40, size=3 if pipe.team.is_first else 4)


def lacks_inputs(pipe):
    for n in range(6, 40):
        pipe.step(None, batch(n)[1])


def saves_nowhere(pipe):
    Path("there").write_text("a file, and no folder")
    pipe.save("there/state")


CASES = {
    raises: "ArithmeticError: the moon is in the wrong place",
    exits: r"the connection to rank 2 \(stage 2\) has broken",
    # torch's watchdog, which would notice at once, may wait for the device, too.
    exits_while_others_load: r"the connection to rank 2 \(stage 2\) has broken|"
    r"rank 2 \(stage 2\): gives no sign of life",
    is_killed: r"the connection to rank 0 \(stage 0\) has broken|rank 0 or its torchrun holds",
    sleeps: rf"rank 1 \(stage 1\): in tick 6, was waited for {TIMEOUT} s",
    sleeps_unread: rf"rank 1 \(stage 1\): in tick 6, was waited for {TIMEOUT} s",
    is_stopped: rf"rank 1 \(stage 1\): gives no sign of life, and was waited for {TIMEOUT} s",
    changes_shape: r"messages are \[3, 6, 8\] float32, .* now, and were \[4, 6, 8\] float32",
    lacks_inputs: "first rank of a column needs the inputs",
    saves_nowhere: "there",
}
# In the other cases, all ranks are.
VICTIMS = {
    raises: 1,
    exits: 2,
    exits_while_others_load: 2,
    is_killed: 0,
    sleeps: 1,
    sleeps_unread: 1,
    is_stopped: 1,
}
CULPRITS = {raises: 1, changes_shape: 0, lacks_inputs: 0}
END_BY_TIMEOUT = (sleeps, sleeps_unread, is_stopped, exits_while_others_load)


def work(case, rank: int, backend: str) -> None:
    """Train, meet the case if it is this rank's, and continue to train."""
    faulthandler.dump_traceback_later(seconds(SECONDS) / 2)  # where does it hang?
    if backend in ordered.MODES:
        ordered.register(backend)
        dist.init_process_group(backend)
    if backend == "nccl":
        os.environ |= nccl_env(rank)
        process_group.have_own_gpus = lambda *_: True  # they share one
        cases.DEVICE = "cuda:0"
    # On a busy machine a rank may be slow for seconds.
    timeout = TIMEOUT if case in END_BY_TIMEOUT else SECONDS
    pipe = rd.DistributedPipeline(model(), timeout=timeout, **options())
    run(pipe, 0, 6)
    if VICTIMS.get(case, rank) == rank:
        case(pipe)
    for n in range(6, 40):
        if case is exits_while_others_load and n > 6:
            load_kernel()
        for _, loss in run(pipe, n, n + 1):
            if case is sleeps_unread:
                loss.item()


def meet(case, tmp_path: Path, backend: str = "gloo") -> None:
    """Have three ranks meet a case; verify that all end, and what they report."""
    store = TCPStore("127.0.0.1", 0, is_master=True)  # as torchrun's
    processes = [
        start(
            work,
            case,
            rank,
            backend,
            folder=tmp_path,
            output=tmp_path / f"{rank}.txt",
            env=rank_env(rank, 3, store.port),
        )
        for rank in range(3)
    ]
    stopped = {1} if case is is_stopped else set()
    try:
        others = [process for rank, process in enumerate(processes) if rank not in stopped]
        assert not end(others, seconds(SECONDS)), "they hang\n" + "\n".join(
            output.read_text() for output in sorted(tmp_path.glob("?.txt"))
        )
        assert all(process.exitcode != 0 for process in others)
    finally:
        end(processes, 0)
    silent = {exits: {2}, exits_while_others_load: {2}, is_killed: {0}}.get(case, set()) | stopped
    for rank in {0, 1, 2} - silent:
        said = (tmp_path / f"{rank}.txt").read_text()
        assert re.search(CASES[case], said), f"rank {rank}: {said}"
        culprit = CULPRITS.get(case, rank)
        if rank != culprit:  # which raises its own error
            assert f"rank {culprit} (stage {culprit}): " in said, f"rank {rank}: {said}"
