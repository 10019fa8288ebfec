"""Predicted against measured throughput of pipelines over processes.

Stages sleep for known times, or compute. Packets travel for 0, 20 or 100 ms through the relay of
benchmarks/pipeline-scaling. The simulator gets the mean times of the actions of every process, as
measured in every round without waiting, and the delay of the link. Of stages that compute it
also gets how much these times vary.

    python benchmarks/pipeline-simulation/run.py --out results.json    # as root, on Linux
    python benchmarks/pipeline-simulation/run.py --grid --out grid.json    # stages by links
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "pipeline-scaling"))

import torch.distributed as dist
from launch import launch
from setting import Setting
from sleeping import SleepyRival, TimedPetra

import redivider as rd

EQUAL = (1.0, 1.0, 1.0, 1.0)
UNEQUAL = (1.0, 1.5, 0.5, 1.0)
SLEEPS = (0.04, 0.08)  # seconds of a forward and of a backward
NUM_TICKS = 24  # of a round


@dataclass(frozen=True)
class Row:
    """One setting of the table."""

    method: str
    latency: float = 1
    link: float = 0.0
    """Seconds of a packet from one process to another."""
    weights: tuple[float, ...] = EQUAL
    """Factors of the sleeps of the stages; none for stages that compute."""
    jitter: float = 0.0
    accumulate: int = 8
    recompute: bool = False
    """Whether a backward sleeps for a forward as well, which it computes again."""

    def __str__(self) -> str:
        is_equal = len(set(self.weights)) == 1
        work = "real work" if not self.weights else "equal" if is_equal else "unequal"
        at = f"latency {self.latency:g}" if self.method == "petra" else f"k = {self.accumulate}"
        return (
            f"{self.method}, {at}, {1000 * self.link:g} ms, {work}"
            + (f", jitter {100 * self.jitter:g} %" if self.jitter else "")
            + (", recomputed" if self.recompute else "")
            + (f", {len(self.weights)} stages" if len(self.weights) not in (0, 4) else "")
        )

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return len(self.weights) or 2


ROWS = [
    Row("petra", 0.5),
    Row("petra", 1),
    Row("petra", 1, weights=UNEQUAL),
    Row("petra", 0.5, weights=UNEQUAL),
    Row("petra", 0.5, jitter=0.2),
    Row("gpipe"),
    Row("1f1b"),
    Row("petra", 0.5, 0.02),
    Row("petra", 1, 0.02, UNEQUAL),
    Row("gpipe", link=0.02),
    Row("1f1b", link=0.02),
    Row("petra", 0.5, 0.1),
    Row("petra", 1, 0.1),
    Row("petra", 2, 0.1),
    Row("petra", 4, 0.1, UNEQUAL),
    Row("petra", 1, 0.1, jitter=0.2),
    Row("1f1b", link=0.1),
    Row("petra", 1, weights=()),
    Row("petra", 0.5, weights=()),
]
# What docs/scale.md simulates, with other times: everything sleeps four times as long.
GRID = [
    row
    for link in (0.0, 0.04, 0.2)
    for num in (2, 4, 8)
    for row in (
        *(Row("petra", latency, link, (1.0,) * num, 0, 32, True) for latency in (0.5, 1, 2)),
        *(Row("1f1b", 1, link, (1.0,) * num, 0, 32, recompute) for recompute in (False, True)),
    )
]


def work(rank: int, rows: list[Row], rounds: int) -> list[list[dict[str, float]]]:
    """Measure settings with the same link and number of processes, in one of these."""
    results = []
    for row in rows:
        dist.barrier()
        results.append(_measure(rank, row, rounds))
    return results


def _measure(rank: int, row: Row, rounds: int) -> list[dict[str, float]]:
    factor = row.weights[rank] if row.weights else 0.0
    forward, backward = SLEEPS
    sleeps = (factor * forward, factor * (backward + row.recompute * forward))
    if row.method != "petra":
        return SleepyRival(row.method, sleeps, row.accumulate).measure(rounds)
    small = Setting(depth=max(2, row.num_processes // 2), width=24, batch=1, patch_size=8)
    setting = small if row.weights else Setting(depth=2)
    cut = setting.cut(row.num_processes)
    petra = TimedPetra(setting, cut, latency=row.latency, sleeps=sleeps, jitter=row.jitter)
    result = petra.measure(NUM_TICKS, rounds)
    petra.close()
    return result


def compare(row: Row, ranks: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return measured and predicted throughput of a setting, medians over the rounds.

    Every round is predicted from its own times: the speed of a core changes with what others run.
    """
    rounds = list(zip(*ranks, strict=True))
    measured = [1 / median(rank["tick"] for rank in by_rank) for by_rank in rounds]
    predicted = [_predict(row, by_rank) for by_rank in rounds]
    return {
        **asdict(row),
        "name": str(row),
        "measured": median(measured),
        "predicted": median(predicted),
        "error": median(predicted) / median(measured) - 1,
        "rounds": list(zip(predicted, measured, strict=True)),
        "ranks": ranks,
        "load": os.getloadavg()[0],
    }


def _predict(row: Row, ranks: Sequence[dict[str, float]]) -> float:
    return rd.simulate(
        row.method,
        row.num_processes,
        row.accumulate,
        forward=[rank["forward"] for rank in ranks],
        backward=[rank["backward"] for rank in ranks],
        latency=row.latency,
        hop=row.link,
        jitter=row.jitter if row.weights else mean(rank["jitter"] for rank in ranks),
        rendezvous=True,
    ).throughput


def main() -> None:
    """Measure all settings, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grid", action="store_true", help="the settings of stages by links")
    parser.add_argument("--only", default="", help="a part of the name of a setting")
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    options = parser.parse_args()
    rows = [row for row in (GRID if options.grid else ROWS) if options.only in str(row)]
    results = []
    for link, num in dict.fromkeys((row.link, row.num_processes) for row in rows):
        own = [row for row in rows if (row.link, row.num_processes) == (link, num)]
        delay = link if link else None
        ranks = launch(work, num, own, options.rounds, delay=delay)
        for row, by_rank in zip(own, zip(*ranks, strict=True), strict=True):
            results.append(compare(row, list(by_rank)))
        if options.out is not None:
            options.out.write_text(json.dumps(results))
    print("| setting | micro-batches/s, predicted | measured | error | within 10 % |")
    print("|---|---|---|---|---|")
    for result in results:
        met = "yes" if abs(result["error"]) <= 0.1 else "**no**"
        print(
            f"| {result['name']} | {result['predicted']:.3g} | {result['measured']:.3g} "
            f"| {100 * result['error']:+.1f} % | {met} |"
        )


if __name__ == "__main__":
    main()
