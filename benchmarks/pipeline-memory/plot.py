"""Plots of the memory that the stages of a pipeline hold, in total and by stage.

python benchmarks/pipeline-memory/plot.py results.json picture.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

plt.rcParams["svg.fonttype"] = "none"

Row = dict[str, Any]

PARTS = {
    "weights": ("weights", "tab:blue"),
    "optimizer": ("optimizer", "tab:cyan"),
    "kept": ("inputs, graphs", "tab:orange"),
    "stashed": ("old weights", "tab:red"),
}
GB = 1e9


def stack(axis: Axes, places: list[Any], groups: list[list[Row]]) -> list[float]:
    """Draw a bar of parts for each group of rows; return their heights."""
    heights = [0.0] * len(groups)
    for part, (label, colour) in PARTS.items():
        sizes = [sum(row.get(part, 0) for row in rows) / GB for rows in groups]
        axis.bar(places, sizes, bottom=heights, color=colour, label=label)
        heights = [height + size for height, size in zip(heights, sizes, strict=True)]
    return heights


def draw_totals(axis: Axes, by_method: dict[str, list[Row]], published: dict[str, Any]) -> None:
    """Draw all stages together, with the published totals."""
    names = list(by_method)
    heights = dict(zip(names, stack(axis, names, list(by_method.values())), strict=True))
    table = {name: min(filter(None, published[name])) for name in names if name in published}
    # Scale without the methods that keep graphs, whose bars would dwarf all others.
    top = 1.15 * max([heights[name] for name in names if "graph" not in name] or [1])
    axis.set_ylim(0, top)
    for name, height in heights.items():
        some = any("out_of_memory" in row for row in by_method[name])
        text = f"{'over ' if some else ''}{height:,.1f}"
        place = max(min(height, top) - 0.05 * top, 0.01 * top)
        axis.text(name, place, text, ha="center", fontsize=8)  # type: ignore[arg-type]
    if table:
        label = "Table 3, by formula"
        marks = (list(table), list(table.values()))
        axis.scatter(*marks, color="black", marker="_", s=500, label=label, zorder=3)
    axis.set_xticks(names, [name.replace(", ", ",\n") for name in names])
    axis.set_ylabel("GB, all stages")
    axis.legend(fontsize=8, loc="upper left")


def draw_stages(axis: Axes, name: str, rows: list[Row]) -> None:
    """Draw each stage of a method, and its peak within a tick."""
    places = [row["stage"] for row in rows]
    stack(axis, places, [[row] for row in rows])
    peaks = [row.get("peak", float("nan")) / GB for row in rows]
    axis.scatter(places, peaks, color="black", marker="_", s=25, label="peak within a tick")
    for row in rows:
        if "out_of_memory" in row:
            axis.text(row["stage"], 0, "out of memory", rotation=90, ha="center", fontsize=7)
    axis.set_title(name, fontsize=9)
    axis.tick_params(labelsize=8)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw totals above and stages below."""
    by_method: dict[str, list[Row]] = {}
    for row in results["rows"]:
        by_method.setdefault(row["method"], []).append(row)
    num_columns = -(-len(by_method) // 2)
    width = 3 * max(num_columns, 3)
    figure = plt.figure(figsize=(width, 9), layout="constrained")
    subfigures: Any = figure.subfigures(2, 1, height_ratios=[4, 5])
    above, below = subfigures
    draw_totals(above.subplots(), by_method, results["published"])
    axes = below.subplots(2, num_columns, squeeze=False)
    for axis in axes.flat[len(by_method) :]:
        axis.axis("off")
    low = [axis for axis, name in zip(axes.flat, by_method, strict=False) if "graph" not in name]
    for axis, (name, rows) in zip(axes.flat, by_method.items(), strict=False):
        draw_stages(axis, name, rows)
    for axis in low[1:]:  # one scale, but for graphs
        axis.sharey(low[0])
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    for line in axes:
        line[0].set_ylabel("GB", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("stage", fontsize=8)
    axes.flat[0].legend(fontsize=6)
    figure.savefig(path)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
