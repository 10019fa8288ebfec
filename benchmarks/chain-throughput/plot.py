"""Throughput against memory, a point for each method.

python benchmarks/chain-throughput/plot.py results.json picture.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker

plt.rcParams["svg.fonttype"] = "none"

COLOURS = {
    "store": "tab:gray",
    "torch checkpoint": "tab:orange",
    "reverse": "tab:blue",
    "overlap": "tab:red",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each setting: captured and compiled steps."""
    rows = [row for row in rows if row["how"] == "captured+compiled" and row["method"] in COLOURS]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    columns = 4
    lines = -(-len(settings) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.8 * lines), squeeze=False)
    for axis in axes.flat[len(settings) :]:
        axis.axis("off")
    for axis, setting in zip(axes.flat, settings, strict=False):
        for row in rows:
            if row["setting"] == setting:
                batch = int(setting.partition("/")[2])
                axis.scatter(
                    row["reserved"] / 2**20,
                    batch / row["ms"] * 1e3,
                    color=COLOURS[row["method"]],
                    label=row["method"],
                    s=60,
                )
        right, top = axis.get_xlim()[1], axis.get_ylim()[1]
        axis.set(title=setting, xlim=(0, 1.1 * right), ylim=(0, 1.1 * top))
        axis.xaxis.set_major_locator(ticker.MaxNLocator(4))
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axis.grid(alpha=0.3)
    for axis in axes.flat[max(0, len(settings) - columns) : len(settings)]:
        axis.set_xlabel("reserved memory (MiB)")
    for line in axes:
        line[0].set_ylabel("samples per second")
    axes.flat[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
