"""Throughput by latency, where stages are slow now and then.

At latency 0.5 a stage waits for a neighbour that is late; at latency 1 a message has half a tick
of slack, and more above. A stage at latency 0.5 sends gradients before it computes those of its
weights ("early"); here this is switched off, too ("late"). Every action may sleep for a random
time, with a mean of some percent of a tick for both actions of it. All methods take turns, with the
same sleeps on average. Beside it stands what a simulation expects of the measured actions.
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

from redivider.pipeline.schedule import Schedule

METHODS = {"0.5, late": 0.5, "0.5, early": 0.5, "1": 1, "2": 2}  # their latencies
SLEEPS = (0.0, 0.05, 0.2)  # mean part of a tick


def slack(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each number of processes, mean sleep and method."""
    return [row for num in processes if num > 1 for row in _rows(setting, num)]


def _rows(setting: Setting, num: int) -> list[dict[str, Any]]:
    results = launch(work, num, setting, setting.cut(num))
    samples = setting.num_microbatches * setting.batch
    rows = []
    for part in SLEEPS:
        seconds, _ = results[0][part]
        actions = {name: [result[part][1][name] for result in results] for name in METHODS}
        expected = {name: simulate(METHODS[name], actions[name], name) for name in METHODS}
        for name in METHODS:
            rows.append(
                {
                    "processes": num,
                    "sleep, % of a tick": 100 * part,
                    "latency": name,
                    "samples/s": samples / median(seconds[name]),
                    "of latency 1": median(seconds["1"]) / median(seconds[name]),
                    "in the fastest rounds": min(seconds["1"]) / min(seconds[name]),
                    "expected": expected["1"] / expected[name],
                    "jitter of an action, %": 100 * max(_jitter(times) for times in actions[name]),
                    "seconds": seconds[name],
                }
            )
    return rows


def work(rank: int, setting: Setting, cut: list[int]) -> dict[float, Any]:
    """Return seconds, and the times of actions, by mean sleep and method."""
    pipes = {name: Sleepy(setting, cut, name) for name in METHODS}
    num = setting.num_microbatches
    tick = largest(pipes["1"].run(num)) / num
    results = {}
    for part in SLEEPS:
        for pipe in pipes.values():
            pipe.longest = part * tick  # of each of two actions, so the mean of both is `part`
        timed = {name: pipe.timed for name, pipe in pipes.items()}
        seconds = take_turns(timed, setting.rounds, setting.patience)
        results[part] = seconds, {name: pipe.actions(num) for name, pipe in pipes.items()}
    dist.barrier()
    for pipe in pipes.values():
        pipe.close()
    return results


class Sleepy(Petra):
    """A pipeline whose actions sleep for random times."""

    longest = 0.0

    def __init__(self, setting: Setting, cut: list[int], method: str) -> None:
        self._random = random.Random(dist.get_rank())
        self._seconds: dict[str, list[float]] = {}
        super().__init__(setting, cut, latency=METHODS[method], fill=False)
        if "late" in method:
            self.pipe.transport.is_urgent = lambda stage: False
        for stage in self.pipe.stages:
            for name in ("run_forward", "run_backward", "finish_backward", "update"):
                setattr(stage, name, self._measured(name, getattr(stage, name)))
        self.run(self.num_until_full)

    def _measured(self, name: str, run: Any) -> Any:
        def sleep_and_run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            if self.longest and name in ("run_forward", "run_backward"):
                time.sleep(self._random.uniform(0.0, self.longest))
            result = run(*args, **kwargs)
            self._seconds.setdefault(name, []).append(time.perf_counter() - start)
            return result

        return sleep_and_run

    def actions(self, num: int) -> dict[str, list[float]]:
        """Return the seconds of every forward, every backward, and what follows a backward."""
        self._seconds.clear()
        self.run(num)
        return dict(self._seconds)


def _jitter(actions: dict[str, list[float]]) -> float:
    """Return the relative deviation of an action's time, the larger of both kinds."""
    kinds = [actions[name] for name in ("run_forward", "run_backward")]
    return max(stdev(times) / mean(times) for times in kinds)


def simulate(
    latency: float, actions: list[dict[str, list[float]]], method: str, num: int = 2000
) -> float:
    """Return the expected seconds of a tick, with measured actions in random order.

    A stage runs its actions in the order of the schedule, each as soon as its message has come.
    Messages take no time. A backward is over for the stage below before weights are updated.
    """
    dice, num_stages = random.Random(method), len(actions)
    schedule = Schedule(num_stages, latency)
    free = [0.0] * num_stages
    sent: dict[tuple[str, int, int], float] = {}
    for tick in range(num):
        for kind, stage, n in schedule.actions(tick):
            source = stage - 1 if kind == "F" else stage + 1
            start = max(free[stage], sent.pop((kind, source, n), 0.0))
            times = actions[stage]
            name = "run_forward" if kind == "F" else "run_backward"
            free[stage] = sent[kind, stage, n] = start + dice.choice(times[name])
            if kind == "B":
                for rest in ("finish_backward", "update"):
                    free[stage] += dice.choice(times.get(rest, [0.0]))
    return max(free) / num
