"""A slow network: every packet takes 100 ms, and messages are given more ticks to travel.

A message that is sent at the end of a tick is needed `latency` ticks later, so it has latency - 1
ticks and the rest of this one to travel; its receiver was made ready as long before it was sent.
Processes leave a barrier up to one delay apart, which a run has to be long beside. What carries the
packets takes time on the same cores, so it carries them without delay, too, for comparison. A
process's speed may differ from that of the one before it by a tenth, so networks take turns, in
processes that are made anew.
"""

import time
from dataclasses import replace
from statistics import median
from typing import Any, TypedDict

import torch.distributed as dist
from launch import launch
from ours import Petra
from rivals import Rival
from setting import Setting
from turns import take_turns

SECONDS = 0.1
LATENCIES = (1, 2, 3)
SIZES = (2, 8)
NUM_MICROBATCHES = 96
NETWORKS = {"loopback": None, "0 ms": 0.0, f"{1000 * SECONDS:.0f} ms": SECONDS}


class Run(TypedDict):
    """What was measured in one process."""

    seconds: float
    """Of the slowest process."""
    computing: float
    """Share of the time in which its main thread was on a core."""
    waiting: float
    """Share of the time in which it waited for messages; not known of others' schedules."""


def delay(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """A row for each latency, and for 1F1B, on each network."""
    setting = replace(setting, num_microbatches=NUM_MICROBATCHES)
    rows = []
    for num in processes:
        if num > 1:
            rows += _rows(setting, num, _take_turns(setting, num, setting.cut(num)))
    return rows


def _take_turns(setting: Setting, num: int, cut: list[int]) -> dict[tuple[str, str], list[Run]]:
    """Runs of all ranks, by method and network."""
    found: dict[tuple[str, str], list[Run]] = {}
    for _ in range(setting.rounds):
        for network, seconds in NETWORKS.items():
            for rank in launch(work, num, setting, cut, delay=seconds):
                for method, run in rank.items():
                    found.setdefault((method, network), []).append(run)
    return found


def work(rank: int, setting: Setting, cut: list[int]) -> dict[str, Run]:
    """In each process; one after the other, as TCP learns the speed of a link that is in use."""
    found = {}
    for latency in LATENCIES:
        petra = Petra(setting, cut, latency=latency)
        found[f"petra, latency {latency}"] = _run(setting, petra)
        petra.close()
    for m in SIZES:
        if m >= len(cut):
            rival = Rival(setting, cut, "1F1B", microbatches=m, recompute=True)
            found[f"1F1B, recomputed, m = {m}"] = _run(setting, rival)
    return found


def _run(setting: Setting, method: Petra | Rival) -> Run:
    run: Run = {"seconds": 0.0, "computing": 0.0, "waiting": 0.0}

    def timed() -> float:
        start, computed = time.perf_counter(), time.thread_time()
        seconds = method.timed()
        run["computing"] = (time.thread_time() - computed) / (time.perf_counter() - start)
        run["waiting"] = sum(end - begin for begin, end in getattr(method, "waited", ())) / seconds
        return seconds

    (run["seconds"],) = take_turns({"it": timed}, 1, setting.patience)["it"]
    dist.barrier()
    return run


def _rows(
    setting: Setting, num: int, runs: dict[tuple[str, str], list[Run]]
) -> list[dict[str, Any]]:
    rows = []
    for method in dict.fromkeys(method for method, _ in runs):
        found = {network: runs[method, network] for network in NETWORKS}
        seconds = {network: median(run["seconds"] for run in found[network]) for network in found}
        first, near, far = NETWORKS
        row: dict[str, Any] = {"processes": num, "method": method}
        samples = setting.num_microbatches * setting.batch
        row |= {f"samples/s, {network}": samples / each for network, each in seconds.items()}
        row |= {f"of {each}": seconds[each] / seconds[far] for each in (first, near)}
        for network in (first, near, far):
            shares = [(run["computing"], run["waiting"]) for run in found[network]]
            computing, waiting = (100 * median(each) for each in zip(*shares, strict=True))
            row[f"% computing, waiting, {network}"] = f"{computing:.1f}, {waiting:.1f}"
        rows.append(row | {"runs": list(found.values())})
    return rows
