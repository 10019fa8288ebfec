"""Run a function in several processes, and collect the results."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.patience import seconds
from support.processes import cases, ordered
from support.workers import end, start


def launch(
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    world_size: int = 2,
    backend: str = "gloo",
) -> list:
    """Call `function(rank, *args)` in every process; return the results, or raise if one raised."""
    folder.mkdir(exist_ok=True)
    processes = [
        start(_work, function, rank, world_size, backend, cases.DEVICE, str(folder), args)
        for rank in range(world_size)
    ]
    hung = end(processes, seconds(120))
    results = [_result(folder, rank) for rank in range(world_size)]
    failed = [f"rank {r}:\n{value}" for r, (good, value) in enumerate(results) if not good]
    assert not failed and not hung, "\n".join(failed) or f"{len(hung)} processes hung"
    return [value for _, value in results]


def launch_alone(
    function: Callable[..., Any], folder: Path, *args: Any, backend: str = "gloo"
) -> Any:
    """Call `function(0, *args)` in one child, as a rank of `launch` is; return its result."""
    folder.mkdir(exist_ok=True)
    [result] = launch(function, folder / "alone", *args, world_size=1, backend=backend)
    return result


def rank_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives to a rank, with its store at `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def nccl_env(rank: int) -> dict[str, str]:
    """Return the environment in which NCCL connects ranks that share a GPU.

    NCCL takes each rank for one on a machine of its own, and transfers through sockets.
    """
    return {
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


def _result(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"result-{rank}.pt"
    return torch.load(path) if path.exists() else (False, "left no result")


def _work(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    backend: str,
    device: str,
    folder: str,
    args: Any,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder) / f"result-{rank}.pt"
    if backend in ordered.MODES:
        ordered.register(backend)
    if "nccl" in backend:
        os.environ |= nccl_env(rank)
    cases.DEVICE = device
    if device == "cuda":
        torch.cuda.set_device(0)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        result = (True, function(rank, *args))
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    torch.save(result, path)
