"""`redivider train` in several processes: under torchrun, or forked as if it had started them."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from redivider.train.recipe import Recipe
from support import workers
from support.patience import seconds
from support.processes.launch import rank_env
from support.training import recipe, rows

NUM_STEPS = 90  # an epoch of 89 micro-batches, in whole updates


def small(**changes) -> Recipe:
    """Return a small recipe of a pipeline of four stages that saves as often as it can."""
    base = {"method": "petra", "stages": 4, "epochs": 1.0, "threads": 1, "save_minutes": 0.0}
    return recipe(**{**base, "log_every": 10, "timeout": seconds(30), **changes})


def start(
    num: int,
    *words: str,
    victim: str = "",
    stop: str = "",
    restarts: int = 0,
    backend: str = "gloo",
) -> subprocess.Popen:
    """Start torchrun."""
    tests = Path(__file__).parents[2]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "VICTIM": victim,
        "STOP": stop,
        "BACKEND": backend,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1"]
    command += ["-m", "support.processes.victim", *words]
    return subprocess.Popen(
        command,
        env=env,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_forked(num: int, *words: str, victim: str, stop: str, restarts: int) -> tuple[int, str]:
    """Run torchrun and its ranks as forks of a process that has imported torch.

    Returns:
        Its process id, which is that of the group of all of them, and the output.
    """
    output = Path.cwd() / "torchrun.txt"
    script = str(Path(__file__).with_name("victim.py"))
    options = ["--standalone", "--nproc-per-node", str(num), "--max-restarts", str(restarts)]
    options += ["--monitor-interval", "0.1", "--run-path", "--start-method", "fork"]
    env = {"VICTIM": victim, "STOP": stop, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = workers.start(
        _run_torchrun, [*options, script, *words], folder=Path.cwd(), output=output, env=env
    )
    assert not workers.end([process], seconds(120)), output.read_text()
    assert process.pid is not None
    return process.pid, output.read_text()


def _run_torchrun(words: list[str]) -> None:
    from torch.distributed.run import main

    os.setsid()
    main(words)


def listen(process: subprocess.Popen) -> str:
    """Wait for torchrun to end; return its output."""
    try:
        return process.communicate(timeout=seconds(120))[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def run_ranks(num: int, *words: str, full: str = "") -> tuple[list[int | None], str]:
    """Run a command in processes as torchrun starts them; return exit codes and the output."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    here = Path.cwd()
    processes = [
        workers.start(
            _play,
            words,
            folder=here,
            output=here / f"{rank}.txt",
            env={**rank_env(rank, num, store.port), "FULL": full},
        )
        for rank in range(num)
    ]
    assert not workers.end(processes, seconds(120)), "they hang"
    said = "".join((here / f"{rank}.txt").read_text() for rank in range(num))
    return [process.exitcode for process in processes], said


def _play(words: tuple[str, ...]) -> int:
    from support.processes.victim import main

    return main(words)


def train_apart(recipe: Recipe, out: Path, *, resume: bool = False) -> None:
    """Train in a process of its own: on some CPUs kernels round differently after other tests."""
    process = workers.start(_train, recipe, out, resume)
    assert not workers.end([process], seconds(120)) and process.exitcode == 0


def _train(recipe: Recipe, out: Path, resume: bool) -> None:
    from redivider.train.loop import train

    train(recipe, out, resume=resume)


def equal(one: Path, other: Path) -> bool:
    """Return whether two runs have the same log and the same weights, to the last bit."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return rows(one) == rows(other) and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def kill_one(number: int, asked: str, whole: Path, backend: str = "gloo") -> None:
    """Kill a rank at a tick, and verify that the run ends as the undisturbed run `whole`.

    Any rank at any tick: also before the first checkpoint, and in the middle of one.
    """
    dice = random.Random(number)
    num = dice.choice([2, 3, 4]) if number else 2  # each process imports torch
    victim = f"{dice.randrange(num)}:{dice.randrange(NUM_STEPS - 2)}"
    words = ("train", asked, "--out", "run")
    process = start(num, *words, victim=victim, restarts=3, backend=backend)
    said = listen(process)
    assert process.returncode == 0, said
    assert Path("killed").exists(), (victim, said)
    assert equal(Path("run"), whole), (num, victim, said)
