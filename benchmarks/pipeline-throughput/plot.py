"""Samples a second against the micro-batch: a panel for each model, a line for each method.

python benchmarks/pipeline-throughput/plot.py results.json [results.json ...] picture.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

plt.rcParams["svg.fonttype"] = "none"

TITLES = {
    "revnet18": "RevNet-18, 10 stages",
    "revnet50": "RevNet-50, 18 stages",
    "vit12": "Rev-ViT-S, 12 layers, 26 stages",
    "vit48": "Rev-ViT-S, 48 layers, 50 stages",
}
LOOKS = {
    "backprop": ("tab:gray", "--"),
    "backprop, compiled whole": ("black", "-"),
    "one branch": ("tab:orange", "--"),
    "branches": ("tab:red", "-"),
    "official PETRA": ("tab:blue", "-"),
}


def main() -> None:
    """Read results and draw them."""
    *sources, target = sys.argv[1:]
    rows: list[dict[str, Any]] = [
        row for source in sources for row in json.loads(Path(source).read_text())
    ]
    models = [name for name in TITLES if any(row["model"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(models), figsize=(3.6 * len(models), 3.4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for method, (colour, line) in LOOKS.items():
            points = sorted(
                (row["batch"], 1000 * row["batch"] / row["ms"])
                for row in rows
                if (row["model"], row["method"]) == (model, method)
            )
            if points:
                axis.plot(*zip(*points, strict=True), line, color=colour, marker="o", label=method)
        batches = sorted({row["batch"] for row in rows if row["model"] == model})
        axis.set(xscale="log", yscale="log", xlabel="micro-batch", title=TITLES[model])
        axis.set_xticks(batches, labels=[str(batch) for batch in batches])
        axis.minorticks_off()
    axes[0][0].set_ylabel("samples a second")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main()
