"""A slow network: every packet takes 100 ms, and messages are given more ticks to travel.

A message that is sent at the end of a tick is needed `latency` ticks later, so it has latency - 1
ticks and the rest of this one to travel; its receiver was made ready as long before it was sent.
Processes leave a barrier up to one delay apart, which a run has to be long beside. What carries the
packets takes time on the same cores, so it carries them without delay, too, for comparison.
"""

from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist
from launch import launch
from ours import Petra
from rivals import Rival
from setting import Setting
from turns import take_turns

SECONDS = 0.1
LATENCIES = (1, 2, 3)
SIZES = (2, 8)
NUM_MICROBATCHES = 48


def delay(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """A row for each latency, and for 1F1B."""
    setting = replace(setting, num_microbatches=NUM_MICROBATCHES)
    rows = []
    for num in processes:
        if num > 1:
            cut = setting.cut(num)
            loopback, near, far = (
                launch(work, num, setting, cut, delay=seconds)[0]
                for seconds in (None, 0.0, SECONDS)
            )
            rows += [
                _row(setting, num, name, loopback[name], near[name], far[name]) for name in near
            ]
    return rows


def work(rank: int, setting: Setting, cut: list[int]) -> dict[str, list[float]]:
    """In each process; one after the other, as TCP learns the speed of a link that is in use."""
    found = {}
    for latency in LATENCIES:
        petra = Petra(setting, cut, latency=latency)
        found[f"petra, latency {latency}"] = _seconds(setting, petra)
        petra.close()
    for m in SIZES:
        if m >= len(cut):
            rival = Rival(setting, cut, "1F1B", microbatches=m, recompute=True)
            found[f"1F1B, recomputed, m = {m}"] = _seconds(setting, rival)
    return found


def _seconds(setting: Setting, method: Petra | Rival) -> list[float]:
    method.timed()
    found = take_turns({"it": method.timed}, setting.rounds, setting.patience)["it"]
    dist.barrier()
    return found


def _row(
    setting: Setting,
    num: int,
    name: str,
    loopback: list[float],
    near: list[float],
    far: list[float],
) -> dict[str, Any]:
    samples = setting.num_microbatches * setting.batch
    return {
        "processes": num,
        "method": name,
        "ms a micro-batch": 1000 * median(near) / setting.num_microbatches,
        "samples/s, loopback": samples / median(loopback),
        "with 0 ms": samples / median(near),
        f"with {1000 * SECONDS:.0f} ms": samples / median(far),
        "kept": median(near) / median(far),
        "seconds": [loopback, near, far],
    }
