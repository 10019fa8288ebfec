"""Timelines of all processes: PETRA, and 1F1B with recomputation."""

import time
from typing import Any

import torch.distributed as dist
from launch import launch
from ours import Petra
from rivals import Rival
from setting import Setting

SIZE = 4  # micro-batches of a step
STEPS = 3


def timeline(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each process by method, with the largest number of processes."""
    num = max(processes)
    if num < 2:
        return []
    by_rank = launch(work, num, setting, setting.cut(num))
    return [row for method in range(2) for row in (methods[method] for methods in by_rank)]


def work(rank: int, setting: Setting, cut: list[int]) -> list[dict[str, Any]]:
    """Measure in one process."""
    m = max(SIZE, len(cut))
    methods: dict[str, Petra | Rival] = {
        "petra": Petra(setting, cut, accumulate=m),
        f"1F1B, recomputed, m = {m}": Rival(setting, cut, "1F1B", microbatches=m, recompute=True),
    }
    rows = []
    for name, method in methods.items():
        dist.barrier()
        method.run(m)
        with method.spans() as spans:
            start = time.perf_counter()
            method.run(STEPS * m)
            end = time.perf_counter()
        waited = sum(b - a for kind, a, b in spans if kind == "W")
        busy = sum(b - a for kind, a, b in spans if kind != "W") - waited
        share = 100 * busy / (end - start)
        rows.append({"method": name, "rank": rank, "computing, %": share, "spans": spans})
        dist.barrier()
        if isinstance(method, Petra):
            method.close()
    return rows
