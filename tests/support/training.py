"""Recipes that take a second, and commands as a user gives them."""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import redivider as rd
from redivider.cli import main
from redivider.train.engine import BackpropEngine
from redivider.train.progress import Progress
from redivider.train.recipe import Recipe
from support import workers
from support.patience import seconds

REVNET = {"model": "revnet18", "model_options": {"width": 4}, "depths": (1, 1)}
"""Options of a RevNet of four units: its batch norms have buffers, and convolutions take long."""


def recipe(**options) -> Recipe:
    """Return the recipe of a transformer of four units on digits."""
    return Recipe(
        **{
            "name": "small",
            "model": "rev_vit_tiny",
            "model_options": {"width": 8, "heads": 2, "depth": 1, "patch_size": 4},
            "data": "digits",
            "microbatch": 16,
            "accumulate": 2,
            "epochs": 0.5,
            "lr": 0.05,
            "weight_decay": 1e-3,
            "warmup": 0.1,
            "schedule": "cosine",
            "log_every": 10,
            "evaluate_every": 0.25,
            "threads": 1,  # bit equality asks for as many everywhere
            **options,
        }
    )


def revnet(backward: str = "store") -> rd.Chain:
    """Return the RevNet, without a recipe."""
    return rd.create_model(
        "revnet18",
        backward=backward,
        depths=(1, 1),
        width=4,
        num_classes=10,
        image_size=8,
        in_channels=1,
    )


def groups(parameters) -> list[dict]:
    """Return parameters in the groups of an optimizer: only weights decay."""
    trained = list(parameters)
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 1e-3},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def stop_after(monkeypatch, num: int) -> None:
    """Send SIGINT after so many micro-batches, once, as Ctrl-C does."""
    monkeypatch.setattr(Progress, "advance", Progress.advance)  # undone at the end
    send_signal("SIGINT", num)


def stop_in_evaluation(monkeypatch) -> None:
    """Send SIGINT while the first run is evaluated, once."""
    evaluate, count = BackpropEngine.evaluate, iter(range(10**6))

    def evaluated(self):
        if next(count) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self)

    monkeypatch.setattr(BackpropEngine, "evaluate", evaluated)


def rows(folder: Path, kind: str = "train") -> list[dict]:
    """Return the rows of a log, without dates, times and memory."""
    log = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    left_out = ("date", "seconds", "samples_per_second", "memory")
    return [
        {name: value for name, value in row.items() if name not in left_out}
        for row in log
        if row["kind"] == kind
    ]


def start_command(
    *arguments: object, output: Path, prepare: tuple[object, ...] = ()
) -> ForkServerProcess:
    """Start `redivider` in a process of its own, which writes to a file.

    Args:
        arguments: Arguments of the command line.
        output: The file.
        prepare: A function to call there first, and its arguments.
    """
    words = [*map(str, arguments)]
    return workers.start(_run, words, *prepare, folder=Path.cwd(), output=output)


def run_command(*arguments: object, prepare: tuple[object, ...] = ()) -> tuple[int, str]:
    """Run `redivider` in a process of its own; return its exit code and what it said.

    Args:
        arguments: Arguments of the command line.
        prepare: A function to call there first, and its arguments.
    """
    output = Path.cwd() / ".output.txt"
    process = start_command(*arguments, output=output, prepare=prepare)
    assert not workers.end([process], seconds(60)), f"it hangs: {output.read_text()}"
    said = output.read_text()
    output.unlink()
    assert process.exitcode is not None
    return process.exitcode, said


def _run(words: list[str], prepare: Callable[..., None] | None = None, *args: object) -> int:
    if prepare is not None:
        prepare(*args)
    return main(words)


def print_to(path: str) -> None:
    """Print to a file instead of the standard output of this process."""
    os.dup2(os.open(path, os.O_WRONLY), 1)


def limit_files(size: int) -> None:
    """Limit the size of the files that this process writes, in bytes, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def send_signal(name: str, after: int) -> None:
    """Send a signal to this process after so many micro-batches, once."""
    advance, count = Progress.advance, iter(range(1, 10**6))

    def advanced(self):
        advance(self)
        if next(count) == after:
            os.kill(os.getpid(), getattr(signal, name))

    Progress.advance = advanced  # type: ignore[method-assign]


def hide(module: str) -> None:
    """Make a module look not installed, and forget our modules that may have imported it."""
    for name in [name for name in sys.modules if name.startswith("redivider.train")]:
        del sys.modules[name]
    sys.modules[module] = None  # type: ignore[assignment]
