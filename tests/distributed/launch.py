"""Runs a function in several processes over gloo, and brings back what they return."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def launch(function: Callable[..., Any], folder: Path, *args: Any, world_size: int = 2) -> list:
    """Call `function(rank, *args)` in each process; raise if any of them raised."""
    folder.mkdir(exist_ok=True)
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_work, args=(function, rank, world_size, str(folder), args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
        process.join()
    results = [_result(folder, rank) for rank in range(world_size)]
    failed = [f"rank {r}:\n{value}" for r, (good, value) in enumerate(results) if not good]
    assert not failed and not alive, "\n".join(failed) or f"{len(alive)} processes hung"
    return [value for _, value in results]


def _result(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"result-{rank}.pt"
    return torch.load(path) if path.exists() else (False, "left no result")


def _work(function: Callable[..., Any], rank: int, world_size: int, folder: str, args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    path = Path(folder) / f"result-{rank}.pt"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        result = (True, function(rank, *args))
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    torch.save(result, path)
