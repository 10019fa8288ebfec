"""Processes that start fast: forked from a server that has imported torch.

They share no state with earlier tests, as new processes do not.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

PRELOADED = [
    "hypothesis",
    "pytest",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "redivider.chain",
    "redivider.models.catalogue",
    "redivider.pipeline.distributed",
    "redivider.train.loop",
    "safetensors.torch",
    "torch.utils.tensorboard",
    "tyro",
]
context = mp.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def start(
    function: Callable[..., Any],
    *args: Any,
    folder: Path | None = None,
    output: Path | None = None,
    env: dict[str, str] | None = None,
) -> ForkServerProcess:
    """Call a function in a process of its own.

    Args:
        function: Called with `args`; a number that it returns is the exit code.
        args: Its arguments.
        folder: Working directory.
        output: File for standard output and standard error.
        env: Variables to set.
    """
    settings = (folder and str(folder), output and str(output), env or {}, dict(os.environ))
    process = context.Process(target=_begin, args=(*settings, function, *args))
    process.start()
    return process


def end(processes: list[ForkServerProcess], limit: float) -> list[ForkServerProcess]:
    """Wait for processes for `limit` seconds in total; kill the rest, and return them."""
    deadline = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
        process.join()
    return alive


def _begin(
    folder: str | None,
    output: str | None,
    env: dict[str, str],
    inherited: dict[str, str],
    function: Callable[..., Any],
    *args: Any,
) -> None:
    os.environ |= inherited | env  # the server's are those of the test that started it
    if folder is not None:
        os.chdir(folder)
    if output is not None:
        with open(output, "w") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
    gc.freeze()  # no collection visits what the server has imported
    torch.set_num_threads(1)
    code = function(*args)
    if isinstance(code, int):
        sys.exit(code)
