"""Comparison with torch.distributed.pipelining: samples a second, and the largest memory.

All updates have the same size: m micro-batches a step there, m to accumulate here.
"""

from statistics import median
from typing import Any

import torch.distributed as dist
from launch import launch
from ours import Petra
from rivals import SCHEDULES, Rival
from setting import Setting
from turns import largest, take_turns


def rivals(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each method, size of an update and number of processes above one."""
    rows = []
    for num in processes:
        if num > 1:
            sizes = [m for m in (2, 4, 8, 16) if num <= m <= 4 * num]
            rows += launch(work, num, setting, sizes)[0]
    return rows


def work(rank: int, setting: Setting, sizes: list[int]) -> list[dict[str, Any]]:
    """Measure in one process."""
    cut = setting.cut(dist.get_world_size())
    rows = []
    for m in sizes:
        petra = Petra(setting, cut, accumulate=m)
        others = {
            f"{name}, {'recomputed' if recompute else 'stored'}": Rival(
                setting, cut, name, microbatches=m, recompute=recompute
            )
            for name in SCHEDULES
            for recompute in (True, False)
        }
        runs = {"petra": petra.timed, **{name: rival.timed for name, rival in others.items()}}
        seconds = take_turns(runs, setting.rounds, setting.patience)
        petra.close()
        memory = peaks(setting, cut, m)
        rows += [_row(setting, len(cut), m, name, seconds, memory[name]) for name in seconds]
    return rows


def peaks(setting: Setting, cut: list[int], m: int) -> dict[str, float]:
    """Return the peak MiB of the largest process, without weights, gradients and momentum."""
    fresh = Petra(setting, cut, accumulate=m, fill=False)
    memory = {"petra": _beside(fresh.peak(2 * m), fresh)}
    fresh.close()
    for name in SCHEDULES:
        for recompute in (True, False):
            rival = Rival(setting, cut, name, microbatches=m, recompute=recompute, warm=False)
            label = f"{name}, {'recomputed' if recompute else 'stored'}"
            memory[label] = _beside(rival.peak(), rival)
    return {name: largest(mib) for name, mib in memory.items()}


def _beside(peak: int, method: Petra | Rival) -> float:
    return (peak - 2 * method.num_parameter_bytes) / 2**20


def _row(
    setting: Setting, num: int, m: int, name: str, seconds: dict[str, list[float]], memory: float
) -> dict[str, Any]:
    return {
        "processes": num,
        "m": m,
        "method": name,
        "samples/s": setting.num_microbatches * setting.batch / median(seconds[name]),
        "petra's speed over it": median(seconds[name]) / median(seconds["petra"]),
        "in the fastest rounds": min(seconds[name]) / min(seconds["petra"]),
        "MiB": memory,
        "runs": len(seconds[name]),
        "seconds": seconds[name],
    }
