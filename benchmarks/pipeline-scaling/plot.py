"""Timelines: a panel for each method, a row for each process.

python benchmarks/pipeline-scaling/plot.py results.json picture.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

plt.rcParams["svg.fonttype"] = "none"
plt.rcParams["svg.hashsalt"] = "timeline"

LOOKS = {"F": ("forward", "tab:blue"), "B": ("backward", "tab:orange"), "W": ("waiting", "white")}
SECONDS = 1.4


def main() -> None:
    """Read results and draw them."""
    source, target = sys.argv[1:]
    rows: list[dict[str, Any]] = json.loads(Path(source).read_text())["timeline"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    num = 1 + max(row["rank"] for row in rows)
    size = (9, 0.8 + 0.45 * num * len(methods))
    figure, axes = plt.subplots(len(methods), 1, figsize=size, sharex=True, squeeze=False)
    for axis, method in zip(axes[:, 0], methods, strict=True):
        draw(axis, [row for row in rows if row["method"] == method])
        axis.set_title(method, loc="left", fontsize="medium")
    axes[-1, 0].set(xlabel="seconds", xlim=(0, SECONDS))
    legend = [Patch(facecolor=c, edgecolor="gray", label=name) for name, c in LOOKS.values()]
    axes[0, 0].legend(
        handles=legend, ncols=3, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1)
    )
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def draw(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw one method, with waiting on top of the action that waits."""
    zero = min(start for row in rows for _, start, _ in row["spans"])
    for row in rows:
        for kind, (_, colour) in LOOKS.items():
            bars = [(a - zero, b - a) for k, a, b in row["spans"] if k == kind]
            bars = [(a, width) for a, width in bars if a < SECONDS and width > 1e-4]
            axis.broken_barh(
                bars, (row["rank"] - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3
            )
    ranks = sorted(row["rank"] for row in rows)
    axis.set_yticks(ranks, labels=[f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()


if __name__ == "__main__":
    main()
