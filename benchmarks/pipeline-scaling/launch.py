"""Run a function in several processes of one thread each, over gloo, and collect the results."""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from network import Relay, enter_network


def launch(
    function: Callable[..., Any], num: int, *args: Any, delay: float | None = None
) -> list[Any]:
    """Call `function(rank, *args)` in each of `num` processes.

    Args:
        function: Function to call; at module level, so that other processes can import it.
        num: Number of processes.
        args: Arguments, the same for all.
        delay: Seconds that every packet takes from one to another; None for plain loopback.
    """
    context = mp.get_context("spawn")
    port, relay = _free_port(), None if delay is None else Relay(delay)
    lines, processes = [], []
    try:
        for rank in range(num):
            here, there = context.Pipe()
            work = (function, rank, num, port, there, delay is not None, args)
            process = context.Process(target=_work, args=work, daemon=True)
            process.start()
            there.close()
            lines.append(here)
            processes.append(process)
        if relay is not None:
            relay.start(lines)
        results = [_result(line, rank) for rank, line in enumerate(lines)]
        for process in processes:
            process.join(10)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        if relay is not None:
            relay.stop()


def _result(line: Connection, rank: int) -> Any:
    try:
        good, value = line.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without a result") from None
    if not good:
        raise RuntimeError(f"rank {rank}:\n{value}")
    return value


def _work(
    function: Callable[..., Any],
    rank: int,
    num: int,
    port: int,
    line: Connection,
    apart: bool,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        host, interface = enter_network(rank, line) if apart else ("127.0.0.1", "lo")
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group(
            "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=num
        )
        result = (True, function(rank, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    line.send(result)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
