"""Samples a second over J processes, against the same pipeline of J stages in one process.

Both do the same arithmetic, so the ratio is the speedup by processes. It can be at most the
ceiling: the time of all stages over that of the longest, measured in the one process. "Apart" is
the limit of the machine: J processes at once, each with a one-process pipeline and no messages.
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
    """Return a row for each number of processes."""
    return [_row(setting, num) for num in processes]


def _row(setting: Setting, num: int) -> dict[str, Any]:
    cut = setting.cut(num)
    result = launch(work, num, setting, cut)[0]
    samples = setting.num_microbatches * setting.batch
    speedup = median(result["one"]) / median(result["many"])
    ceiling = sum(result["stages"]) / max(result["stages"])
    return {
        "processes": num,
        "units": "+".join(map(str, cut)),
        "ms a tick": 1000 * median(result["many"]) / setting.num_microbatches,
        "samples/s, one process": samples / median(result["one"]),
        "samples/s": samples / median(result["many"]),
        "speedup": speedup,
        "of the fastest rounds": min(result["one"]) / min(result["many"]),
        "ceiling, FLOPs": result["balance"],
        "ceiling, measured": ceiling,
        "of the measured ceiling": speedup / ceiling,
        "apart": num * median(result["one"]) / median(result["apart"]),
        "runs": len(result["many"]),
        "seconds": [result["one"], result["many"], result["apart"]],
        "seconds of stages": result["stages"],
    }


def work(rank: int, setting: Setting, cut: list[int]) -> dict[str, Any]:
    """Run, in one process, a part of the shared pipeline, and the whole one alone and apart."""
    many = Petra(setting, cut)
    one = Petra(setting, cut, spread=False)
    balance = balance_by_work(setting, cut)
    alone = one.timed if rank == 0 else lambda: 0.0
    runs = {"one": alone, "many": many.timed, "apart": one.timed}
    result: dict[str, Any] = dict(take_turns(runs, setting.rounds, setting.patience))
    if rank == 0:
        result |= {"stages": one.stage_seconds(setting.num_microbatches), "balance": balance}
    dist.barrier()
    many.close()
    return result


def balance_by_work(setting: Setting, cut: list[int]) -> float:
    """Return the best speedup of the cut by FLOPs: all stages over the largest."""
    costs = count_costs(setting.model(), "work", setting.examples()[0])
    return balance_of(loads_of(costs, cut))
