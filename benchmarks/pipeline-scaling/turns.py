"""Runs of several methods in turns, so that their ratios compare the same period."""

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
    """Run methods in turns; return the seconds of every run, of the slowest process.

    Args:
        runs: Functions that train for a while and return the seconds.
        rounds: Number of runs of each method.
        patience: Seconds for which a run is delayed or repeated while other programs use the
            machine. Runs that were disturbed count only if all were.
    """
    timed: dict[str, list[tuple[float, bool]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            timed[name].append(_run_alone(run, patience))
    return {name: _that_count(pairs) for name, pairs in timed.items()}


def _that_count(runs: list[tuple[float, bool]]) -> list[float]:
    alone = [seconds for seconds, is_alone in runs if is_alone]
    return alone or [seconds for seconds, _ in runs]


def _run_alone(run: Callable[[], float], patience: float) -> tuple[float, bool]:
    """Return the seconds of a run, and whether no other program used the machine."""
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
    """Call in all processes; return the result and the cores that others used (Linux only)."""
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
    """Return the seconds that all cores were busy since boot."""
    user, nice, system, _, _, *rest = map(int, stat.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def largest(number: float) -> float:
    """Return the largest of all processes' numbers."""
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)
