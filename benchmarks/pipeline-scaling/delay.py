"""A slow network: every packet takes 100 ms, and messages have more ticks to travel.

A message that is sent at the end of a tick is needed `latency` ticks later, so it has latency - 1
ticks and the rest of this one to travel. Its receive is posted earlier than that. Processes leave a
barrier up to one delay apart, so a run has to be much longer than that. The relay of the packets
uses the same cores, so for comparison it also runs without delay. Speeds of processes may differ by
a tenth from one launch to the next, so networks take turns, in new processes.
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
    """Measurements of one process."""

    seconds: float
    """Seconds of the slowest process."""
    computing: float
    """Share of the time that its main thread ran on a core."""
    waiting: float
    """Share of the time that it waited for messages; unknown for torch's schedules."""


def delay(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each latency and for 1F1B, with figures of each network."""
    setting = replace(setting, num_microbatches=NUM_MICROBATCHES)
    rows = []
    for num in processes:
        if num > 1:
            rows += _rows(setting, num, _take_turns(setting, num, setting.cut(num)))
    return rows


def _take_turns(setting: Setting, num: int, cut: list[int]) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of all ranks, by method and network."""
    runs: dict[tuple[str, str], list[Run]] = {}
    for _ in range(setting.rounds):
        for network, seconds in NETWORKS.items():
            for rank in launch(work, num, setting, cut, delay=seconds):
                for method, run in rank.items():
                    runs.setdefault((method, network), []).append(run)
    return runs


def work(rank: int, setting: Setting, cut: list[int]) -> dict[str, Run]:
    """Run all methods in one process, one after another, as TCP adapts to a link in use."""
    runs = {}
    for latency in LATENCIES:
        petra = Petra(setting, cut, latency=latency)
        runs[f"petra, latency {latency}"] = _run(setting, petra)
        petra.close()
    for m in SIZES:
        if m >= len(cut):
            rival = Rival(setting, cut, "1F1B", microbatches=m, recompute=True)
            runs[f"1F1B, recomputed, m = {m}"] = _run(setting, rival)
    return runs


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
        by_network = {network: runs[method, network] for network in NETWORKS}
        seconds = {
            network: median(run["seconds"] for run in by_network[network]) for network in by_network
        }
        first, near, far = NETWORKS
        row: dict[str, Any] = {"processes": num, "method": method}
        samples = setting.num_microbatches * setting.batch
        row |= {
            f"samples/s, {network}": samples / duration for network, duration in seconds.items()
        }
        row |= {f"of {network}": seconds[network] / seconds[far] for network in (first, near)}
        for network in (first, near, far):
            shares = [(run["computing"], run["waiting"]) for run in by_network[network]]
            computing, waiting = (100 * median(column) for column in zip(*shares, strict=True))
            row[f"% computing, waiting, {network}"] = f"{computing:.1f}, {waiting:.1f}"
        rows.append(row | {"runs": list(by_network.values())})
    return rows
