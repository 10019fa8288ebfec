"""Memory of a compiled step by the lane that takes it, counted on the CPU.

    python benchmarks/chain-throughput/pools.py rev_vit_small 16 --depth 4

CUDA's allocator has a pool for every CUDA stream, and a captured graph keeps the largest size of
each. Here the overlap runs on the CPU with lanes that are only names, and the allocator's events
tell how much each of them would hold.
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
    """Lanes that only label what runs in them."""

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with record_function(f"lane {lane}"):
            yield

    def mark(self, lane: Lane) -> None:
        return None

    def wait(self, lane: Lane, event: Any) -> None:
        pass


class OnTheCpu(Overlap):
    """Overlap with named lanes."""

    def _make_lanes(self) -> Lanes:
        return Named()


def count(step: Step, backward: str) -> tuple[list[float], float]:
    """Return the peak of each lane, and of both together at one time, in MiB."""
    for _ in range(2):
        step.run(backward)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step.run(backward)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [
        (event["dur"], event["ts"], int(event["name"][-1]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("lane ")
    ]
    spans.sort()  # the innermost is the shortest
    taken: dict[int, tuple[Lane, int]] = {}
    held, peaks, peak = [0, 0], [0, 0], 0
    memory = (event for event in events if event.get("name") == "[memory]")
    for event in sorted(memory, key=lambda event: float(event["ts"])):
        address, size, at = event["args"]["Addr"], event["args"]["Bytes"], event["ts"]
        if size > 0:
            lane = next((name for dur, ts, name in spans if ts <= at <= ts + dur), MAIN)
            taken[address] = lane, size
            held[lane] += size
        elif address in taken:  # others were allocated before
            lane, size = taken.pop(address)
            held[lane] -= size
        peaks = [*map(max, peaks, held)]
        peak = max(peak, sum(held))
    return [size / MIB for size in peaks], peak / MIB


def main() -> None:
    """Count `reverse` and `overlap`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--depth", type=int)
    args = parser.parse_args()
    cpu = torch.device("cpu")
    Strategy.make_overlap = (  # type: ignore[method-assign]
        lambda self, x: OnTheCpu(cpu) if self.overlaps else None
    )
    options = {} if args.depth is None else {"depth": args.depth}
    step = Step(args.model, args.batch, torch.device("cpu"), compiled=True, **options)
    for backward in ("reverse", "overlap"):
        peaks, peak = count(step, backward)
        print(
            f"{backward}: {peaks[MAIN]:.1f} + {peaks[SIDE]:.1f} = {sum(peaks):.1f} MiB "
            f"in two pools, {peak:.1f} at one time"
        )


if __name__ == "__main__":
    main()
