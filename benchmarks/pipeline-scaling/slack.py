"""Throughput by latency, where stages are slow now and then.

At latency 0.5 a stage waits for a neighbour that is late; at latency 1 a message has half a tick
of slack, and more above. Every action may sleep for a random time, with a mean of some percent of a
tick for both actions of it. All latencies take turns, with the same sleeps on average.
"""

import random
import time
from statistics import mean, median, stdev
from typing import Any

import torch.distributed as dist
from launch import launch
from ours import Petra
from setting import Setting
from turns import largest, take_turns

LATENCIES = (0.5, 1, 2)
SLEEPS = (0.0, 0.05, 0.2)  # mean part of a tick


def slack(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each number of processes, mean sleep and latency."""
    return [row for num in processes if num > 1 for row in _rows(setting, num)]


def _rows(setting: Setting, num: int) -> list[dict[str, Any]]:
    results = launch(work, num, setting, setting.cut(num))
    samples = setting.num_microbatches * setting.batch
    rows = []
    for part in SLEEPS:
        seconds, _ = results[0][part]
        for latency in LATENCIES:
            name = f"{latency}"
            jitter = max(result[part][1][name] for result in results)
            rows.append(
                {
                    "processes": num,
                    "sleep, % of a tick": 100 * part,
                    "latency": latency,
                    "samples/s": samples / median(seconds[name]),
                    "of latency 1": median(seconds["1"]) / median(seconds[name]),
                    "in the fastest rounds": min(seconds["1"]) / min(seconds[name]),
                    "jitter of an action, %": 100 * jitter,
                    "seconds": seconds[name],
                }
            )
    return rows


def work(rank: int, setting: Setting, cut: list[int]) -> dict[float, Any]:
    """Return seconds and jitter by mean sleep and latency."""
    pipes = {f"{latency}": Sleepy(setting, cut, latency=latency) for latency in LATENCIES}
    num = setting.num_microbatches
    tick = largest(pipes["1"].run(num)) / num
    results = {}
    for part in SLEEPS:
        for pipe in pipes.values():
            pipe.longest = part * tick  # of each of two actions, so the mean of both is `part`
        timed = {name: pipe.timed for name, pipe in pipes.items()}
        seconds = take_turns(timed, setting.rounds, setting.patience)
        results[part] = seconds, {name: pipe.jitter(num) for name, pipe in pipes.items()}
    dist.barrier()
    for pipe in pipes.values():
        pipe.close()
    return results


class Sleepy(Petra):
    """A pipeline whose actions sleep for random times."""

    longest = 0.0

    def __init__(self, setting: Setting, cut: list[int], *, latency: float) -> None:
        self._random = random.Random(dist.get_rank())
        self._seconds: list[tuple[str, float]] = []
        super().__init__(setting, cut, latency=latency, fill=False)
        for stage in self.pipe.stages:
            for name in ("run_forward", "run_backward"):
                setattr(stage, name, self._sleeping(name, getattr(stage, name)))
        self.run(self.num_until_full)

    def _sleeping(self, name: str, run: Any) -> Any:
        def sleep_and_run(message: Any) -> Any:
            start = time.perf_counter()
            if self.longest:
                time.sleep(self._random.uniform(0.0, self.longest))
            result = run(message)
            self._seconds.append((name, time.perf_counter() - start))
            return result

        return sleep_and_run

    def jitter(self, num: int) -> float:
        """Return the relative deviation of an action's time, the larger of both kinds."""
        self._seconds.clear()
        self.run(num)
        times = [
            [seconds for kind, seconds in self._seconds if kind == name]
            for name in ("run_forward", "run_backward")
        ]
        return max(stdev(kind) / mean(kind) for kind in times)
