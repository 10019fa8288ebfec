"""Memory of a compiled step by the lane that takes it, counted on the CPU.

    python benchmarks/chain-throughput/pools.py rev_vit_small 16 --depth 4

CUDA's allocator has a pool for every CUDA stream, and a captured graph keeps the largest size that
each of them ever had. Here the engine of the overlap runs on the CPU, lanes are only names, and the
allocator's own events tell what each would hold.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from redivider.backward.overlap import MAIN, SIDE, Lane, Lanes, Overlap
from redivider.backward.strategy import Strategy

# Appended, so that modules of this folder are found first.
sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from steps import Step

MIB = 2**20


class Named(Lanes):
    """Lanes that only tell where what is run belongs."""

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with record_function(f"lane {lane}"):
            yield

    def mark(self, lane: Lane) -> None:
        return None

    def wait(self, lane: Lane, event: Any) -> None:
        pass


class OnTheCpu(Overlap):
    """The engine with such lanes."""

    def _make_lanes(self) -> Lanes:
        return Named()


def count(step: Step, way: str) -> tuple[list[float], float]:
    """The peak of each lane, and of both together at one time, in MiB."""
    for _ in range(2):
        step.run(way)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step.run(way)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [
        (each["dur"], each["ts"], int(each["name"][-1]))
        for each in events
        if each.get("cat") == "user_annotation" and each["name"].startswith("lane ")
    ]
    spans.sort()  # the innermost is the shortest
    taken: dict[int, tuple[Lane, int]] = {}
    held, peaks, peak = [0, 0], [0, 0], 0
    memory = (each for each in events if each.get("name") == "[memory]")
    for event in sorted(memory, key=lambda each: float(each["ts"])):
        address, size, at = event["args"]["Addr"], event["args"]["Bytes"], event["ts"]
        if size > 0:
            lane = next((each for dur, ts, each in spans if ts <= at <= ts + dur), MAIN)
            taken[address] = lane, size
            held[lane] += size
        elif address in taken:  # others were there before
            lane, size = taken.pop(address)
            held[lane] -= size
        peaks = [*map(max, peaks, held)]
        peak = max(peak, sum(held))
    return [each / MIB for each in peaks], peak / MIB


def main() -> None:
    """Count `reverse` and `overlap`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--depth", type=int)
    given = parser.parse_args()
    cpu = torch.device("cpu")
    Strategy.make_overlap = lambda self, x: OnTheCpu(cpu) if self.overlaps else None
    options = {} if given.depth is None else {"depth": given.depth}
    step = Step(given.model, given.batch, torch.device("cpu"), compiled=True, **options)
    for way in ("reverse", "overlap"):
        peaks, peak = count(step, way)
        print(
            f"{way}: {peaks[MAIN]:.1f} + {peaks[SIDE]:.1f} = {sum(peaks):.1f} MiB in two pools, "
            f"{peak:.1f} at one time"
        )


if __name__ == "__main__":
    main()
