"""Runs of several methods in turns, so that their ratios are of one time."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
LIMIT = 0.1  # cores that other programs may use in a run that counts


def take_turns(
    runs: Mapping[str, Callable[[], float]], rounds: int, patience: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each method's runs; those of the slowest process.

    Args:
        runs: Each trains for a while and returns its seconds.
        rounds: How often each of them runs.
        patience: Seconds in which a run is put off, or repeated, while other programs use the
            machine. Runs beside others count only where there are no better ones.
    """
    found: dict[str, list[tuple[float, bool]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(_run_alone(run, patience))
    return {name: _that_count(each) for name, each in found.items()}


def _that_count(runs: list[tuple[float, bool]]) -> list[float]:
    alone = [seconds for seconds, is_alone in runs if is_alone]
    return alone or [seconds for seconds, _ in runs]


def _run_alone(run: Callable[[], float], patience: float) -> tuple[float, bool]:
    """Seconds of a run, and whether nobody else used the machine."""
    deadline = time.perf_counter() + patience
    while True:
        while patience and largest(_used_by_others(partial(time.sleep, 0.3))[1]) > LIMIT:
            if largest(time.perf_counter() - deadline) > 0:
                break
        dist.barrier()
        seconds, others = _used_by_others(run)
        result = largest(seconds), largest(others) < LIMIT
        if not patience or result[1] or largest(time.perf_counter() - deadline) > 0:
            return result


def _used_by_others(function: Callable[[], T]) -> tuple[T, float]:
    """Call in all processes; the result, and the cores that other programs used (Linux alone)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return function(), 0.0
    start, machine, own = time.perf_counter(), _busy(stat), time.process_time()
    result = function()
    mine = torch.tensor([time.process_time() - own], dtype=torch.float64)
    dist.all_reduce(mine)
    others = _busy(stat) - machine - float(mine)
    return result, others / (time.perf_counter() - start)


def _busy(stat: Path) -> float:
    """Seconds that the cores have worked since the machine was started."""
    user, nice, system, _, _, *rest = map(int, stat.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def largest(number: float) -> float:
    """Of all processes' numbers."""
    told = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)
