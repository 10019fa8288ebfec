"""Throughput of pipelines from 2 to 1,024 stages and from 0.1 to 200 ms a hop, simulated.

A forward of a stage takes 10 ms, a backward 20 ms, and 30 ms where the forward is computed again.
Throughput is a share of that of a device that never waits and computes nothing again.

    python benchmarks/pipeline-simulation/scale.py    # also draws stages.svg and hops.svg
"""

from math import ceil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import redivider as rd
from redivider.train.plots import COLOURS

plt.rcParams["svg.fonttype"] = "none"
plt.rcParams["svg.hashsalt"] = "scale"

FORWARD, BACKWARD = 10.0, 20.0  # ms
NUM = 128  # micro-batches of an update
STAGES = [2**n for n in range(1, 11)]
HOPS = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
GRAPH = 24  # size of what plain autograd keeps in a stage, in inputs of the stage
MEMORY = 64  # the same, of a device
LATENCIES = [0.5, 1, 2, 4, 8, 16]


def late(stages: int, latency: float) -> float:
    """Return the updates by which PETRA's oldest gradients are late."""
    return 2 * latency * (stages - 1) / NUM


def petra(stages: int, hop: float, latency: float) -> float:
    """Return the share of full throughput that PETRA reaches."""
    backward = BACKWARD + FORWARD
    result = rd.simulate("petra", stages, NUM, FORWARD, backward, latency, hop)
    return result.throughput * (FORWARD + BACKWARD)


def best_petra(stages: int, hop: float, max_late: float = 1.0) -> tuple[float, float]:
    """Return PETRA's share at the best latency within a limit on delay, and that latency.

    Both are 0 if the smallest latency is beyond the limit.
    """
    within = [latency for latency in LATENCIES if late(stages, latency) <= max_late]
    shares = [(petra(stages, hop, latency), -latency) for latency in within]
    share, latency = max(shares, default=(0.0, 0.0))
    return share, -latency


def synchronous(
    method: str, stages: int, hop: float, num: int = NUM, *, recompute: bool = False
) -> float:
    """Return the share of full throughput that a synchronous method reaches."""
    result = rd.simulate(method, stages, num, FORWARD, BACKWARD, hop=hop, recompute=recompute)
    return result.throughput * (FORWARD + BACKWARD)


def at_equal_memory(stages: int, hop: float) -> list[str]:
    """Return the shares of methods whose devices hold no more than `MEMORY` inputs of a stage.

    Micro-batches are divided until they fit. Smaller ones are assumed to be as efficient.
    """
    cells = []
    share, latency = best_petra(stages, hop)
    cells.append(describe(stages, share, latency))
    for method, recompute in (("1f1b", True), ("1f1b", False), ("zero-bubble", False)):
        size = min(NUM, stages) + GRAPH if recompute else min(NUM, stages) * GRAPH
        parts = max(1, ceil(size / MEMORY))
        forward, backward = FORWARD / parts, BACKWARD / parts
        result = rd.simulate(
            method, stages, NUM * parts, forward, backward, hop=hop, recompute=recompute
        )
        share = result.throughput * (forward + backward)
        cells.append(f"{100 * share:.0f} (1/{parts})" if parts > 1 else f"{100 * share:.0f}")
    return cells


def describe(stages: int, share: float, latency: float) -> str:
    """Return the cell of PETRA's best: share, latency and updates late."""
    return f"{100 * share:.0f} ({latency:g}; {late(stages, latency):.2g})" if share else "-"


def shares(stages: int, hop: float) -> dict[str, float]:
    """Return the shares of all methods."""
    best, _ = best_petra(stages, hop)
    return {
        "PETRA, latency 0.5": petra(stages, hop, 0.5),
        "PETRA, latency 1": petra(stages, hop, 1),
        "PETRA, best latency, at most one update late": best or float("nan"),
        "1F1B, recomputed": synchronous("1f1b", stages, hop, recompute=True),
        "1F1B": synchronous("1f1b", stages, hop),
        "zero bubble (H1)": synchronous("zero-bubble", stages, hop),
    }


def draw(
    axis: Axes, at: list[float], rows: list[dict[str, float]], stages: list[int], title: str
) -> None:
    """Draw a line per method, and crosses where gradients are more than an update late."""
    styles = ["--", "-", "-", "--", "-", "-"]
    colours = [COLOURS[i] for i in (0, 0, 2, 1, 1, 3)]
    for name, style, colour in zip(rows[0], styles, colours, strict=True):
        values = [100 * row[name] for row in rows]
        width = 2.2 if "best" in name else 1.3
        axis.plot(at, values, style, color=colour, lw=width, marker="o", ms=3, label=name)
        if ", latency" in name:
            latency = float(name.split()[-1])
            beyond = [i for i, own in enumerate(stages) if late(own, latency) > 1]
            crosses = [at[i] for i in beyond], [values[i] for i in beyond]
            axis.plot(*crosses, "x", color=colour, ms=8, mew=1.6)
    axis.plot([], [], "x", color="0.3", ms=8, mew=1.6, label="more than one update late")
    axis.set_xscale("log", base=2 if at[0] == 2 else 10)
    axis.set_xticks(at, [f"{x:g}" for x in at])
    axis.minorticks_off()
    axis.set(ylim=(0, 102), title=title)
    axis.grid(alpha=0.2)


Panel = tuple[str, list[float], list[dict[str, float]], list[int]]


def picture(path: Path, panels: list[Panel]) -> None:
    """Draw panels beside each other, with one legend."""
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 4.2), sharey=True, squeeze=False)
    for axis, (title, at, rows, stages) in zip(axes[0], panels, strict=True):
        draw(axis, at, rows, stages, title)
        axis.set_xlabel("stages" if at[0] == 2 else "ms of a hop")
    axes[0, 0].set_ylabel("% of full throughput")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize="small")
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the tables, and draw the pictures."""
    here = Path(__file__).parent
    stages = [float(number) for number in STAGES]
    print(f"## At equal samples per update: k = {NUM}\n")
    print("| stages | hop, ms | PETRA 0.5 | 1 | best | 1F1B | recomputed | zero bubble |")
    print("|---|---|---|---|---|---|---|---|")
    for number in (2, 8, 32, 128, 1024):
        for hop in (0.1, 1.0, 10.0, 50.0, 200.0):
            row = shares(number, hop)
            best, latency = best_petra(number, hop)
            cells = [petra(number, hop, 0.5), petra(number, hop, 1)]
            texts = [
                f"{100 * cell:.0f}" + ("*" if late(number, own) > 1 else "")
                for cell, own in zip(cells, (0.5, 1), strict=True)
            ]
            texts.append(describe(number, best, latency))
            texts += [
                f"{100 * row[n]:.0f}" for n in ("1F1B", "1F1B, recomputed", "zero bubble (H1)")
            ]
            print(f"| {number} | {hop:g} | {' | '.join(texts)} |")
    print(f"\n## At equal memory: {MEMORY} inputs of a stage\n")
    print("| stages | hop, ms | PETRA (latency; late) | 1F1B, recomputed | 1F1B | zero bubble |")
    print("|---|---|---|---|---|---|")
    for number in (2, 8, 32, 128, 1024):
        # Beyond 128 stages k = 128 fills no pipeline: a row is enough, and takes a minute.
        for hop in (0.1, 1.0, 10.0, 50.0, 200.0) if number <= 128 else (0.1,):
            print(f"| {number} | {hop:g} | {' | '.join(at_equal_memory(number, hop))} |")
    print("\n## With k = 4 J\n")
    for number in (8, 64, 1024):
        k = 4 * number
        values = [synchronous(m, number, 1.0, k) for m in ("1f1b", "interleaved", "zero-bubble")]
        delay = 2 * (number - 1) / k
        texts = [f"{100 * value:.0f}" for value in (petra(number, 1.0, 1), *values)]
        print(f"| {number} | {k} | {delay:.2f} | {' | '.join(texts)} |")
    panels = []
    for hop in (0.1, 20.0):
        rows = [shares(number, hop) for number in STAGES]
        panels.append((f"{NUM} micro-batches an update, {hop:g} ms a hop", stages, rows, STAGES))
    picture(here / "stages.svg", panels)
    panels = []
    for number in (8, 32):
        rows = [shares(number, hop) for hop in HOPS]
        title = f"{number} stages, {NUM} micro-batches an update"
        panels.append((title, HOPS, rows, [number] * len(HOPS)))
    picture(here / "hops.svg", panels)


if __name__ == "__main__":
    main()
