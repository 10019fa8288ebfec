"""Samples a second over J processes, against the same pipeline of J stages in one process.

Both do the same arithmetic, so the ratio is what the processes are worth. It can be at most the
ceiling: the time of all stages over that of the longest, measured in the one process. "Apart" is
what the machine allows: J processes at once that each run the one-process pipeline, and never talk.
"""

from statistics import median
from typing import Any

import torch.distributed as dist
from launch import launch
from ours import Petra
from setting import Setting
from turns import take_turns

from redivider.pipeline.partition import balance_of, count_costs, loads_of


def scaling(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """A row for each number of processes."""
    return [_row(setting, num) for num in processes]


def _row(setting: Setting, num: int) -> dict[str, Any]:
    cut = setting.cut(num)
    found = launch(work, num, setting, cut)[0]
    samples = setting.num_microbatches * setting.batch
    speedup = median(found["one"]) / median(found["many"])
    ceiling = sum(found["stages"]) / max(found["stages"])
    return {
        "processes": num,
        "units": "+".join(map(str, cut)),
        "ms a tick": 1000 * median(found["many"]) / setting.num_microbatches,
        "samples/s, one process": samples / median(found["one"]),
        "samples/s": samples / median(found["many"]),
        "speedup": speedup,
        "of the fastest rounds": min(found["one"]) / min(found["many"]),
        "ceiling, FLOPs": found["balance"],
        "ceiling, measured": ceiling,
        "of the measured ceiling": speedup / ceiling,
        "apart": num * median(found["one"]) / median(found["apart"]),
        "runs": len(found["many"]),
        "seconds": [found["one"], found["many"], found["apart"]],
        "seconds of stages": found["stages"],
    }


def work(rank: int, setting: Setting, cut: list[int]) -> dict[str, Any]:
    """In each process: all in one pipeline, the first one alone, and all at once but apart."""
    many = Petra(setting, cut)
    one = Petra(setting, cut, spread=False)
    balance = balance_by_work(setting, cut)
    alone = one.timed if rank == 0 else lambda: 0.0
    runs = {"one": alone, "many": many.timed, "apart": one.timed}
    found: dict[str, Any] = dict(take_turns(runs, setting.rounds, setting.patience))
    if rank == 0:
        found |= {"stages": one.stage_seconds(setting.num_microbatches), "balance": balance}
    dist.barrier()
    many.close()
    return found


def balance_by_work(setting: Setting, cut: list[int]) -> float:
    """What the cut allows by FLOPs: the work of all stages over that of the largest."""
    costs = count_costs(setting.model(), "work", setting.examples()[0])
    return balance_of(loads_of(costs, cut))
