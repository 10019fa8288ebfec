"""Draw the results, one SVG per figure, from the JSON lines beside them.

python experiments/plot.py  # needs matplotlib
"""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker
from matplotlib.colors import Normalize, TwoSlopeNorm

import redivider as rd

FOLDERS = {
    "revnet18": "revnet18-300-epochs",
    "revnet34": "revnet34-50-short",
    "revnet50": "revnet34-50-short",
    "short": "cost-of-delay",
    "quality": "gradient-by-stage",
    "muon": "muon",
    "sooner": "fewer-epochs",
    "deeper": "fewer-epochs",
    "small": "delay-in-small-networks",
    "race": "race-to-90",
    "vit": "transformers",
    "gpt": "transformers",
    "overlap": "overlap-speedup",
    "limits": "largest-batch",
    "finetune": "fine-tuning",
    "accuracy": "fine-tuning",
    "budget": "memory-budgets",
    "grid": "scale",
}
PUBLISHED = {
    "revnet18": 94.9,
    "revnet34": 94.8,
    "revnet50": 94.5,
}  # percent, in 300 epochs
NUM_STAGES = 10  # of RevNet-18, one per block, if a row has no number
# Of the stages that sleep: seconds of a forward and a backward, micro-batches of an update.
FORWARD, BACKWARD, K = 0.04, 0.08, 32
SIMULATED = (2, 4, 8, 16, 32)  # numbers of stages
Row = dict[str, Any]
plt.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "redivider",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def path_of(name: str, suffix: str) -> Path:
    """Return the path of a data file or a figure."""
    return Path(__file__).parent / FOLDERS[name] / f"{name}.{suffix}"


def read(name: str) -> list[Row]:
    """Return the rows of a file, without failed runs."""
    lines = path_of(name, "jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "failed" not in row]


def percent(row: Row) -> float:
    """Return the final test accuracy in percent."""
    return 100 * float(row["last"])


def model_of(row: Row) -> str:
    """Return the name of the model, RevNet-18 if the run's name has none."""
    match = re.search(r"revnet\d+", row["run"])
    return match[0] if match else "revnet18"


def num_in_flight(row: Row) -> int:
    """Return how many samples enter between a sample's forward and backward in the first stage."""
    num_stages = row.get("stages") or NUM_STAGES
    return int(2 * (num_stages - 1) * row["latency"] * row["microbatch"])


def note(row: Row) -> str:
    """Return the label of a run of PETRA: its stages, or its micro-batch and latency."""
    if "-stages-" in row["run"]:
        return f"{row['stages']} stages"
    return f"{row['microbatch']}" + (f", latency {row['latency']}" if row["latency"] != 1 else "")


def place(row: Row) -> Row:
    """Return the position of the label: above all points for fewer stages, else below its own."""
    if "-stages-" in row["run"]:
        above = (num_in_flight(row), 92.3)
        return {"xytext": above, "ha": "center", "fontsize": 7, "color": "tab:orange"}
    below = (-6, {0.5: -22, 1: -12}.get(row["latency"], -4))
    return {"xytext": below, "textcoords": "offset points", "ha": "right", "fontsize": 7}


def draw_short(rows: list[Row]) -> None:
    """Draw RevNet-18 in 20 epochs, by method and by samples in flight."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    usual = [row for row in rows if row["run"] == f"{row['method']}-64x2"]
    for row in sorted(usual, key=percent, reverse=True):
        epochs, _, scores = zip(*row["curve"], strict=True)
        label = f"{row['method']} {percent(row):.1f}"
        left.plot(epochs, [100 * score for score in scores], label=label, linewidth=1.3)
    left.set(xlabel="epochs", ylabel="test accuracy (%)", ylim=(60, 93))
    left.set_title("by method, micro-batches of 64", fontsize=10)
    left.xaxis.set_major_locator(ticker.MultipleLocator(5))
    left.legend(fontsize=7, loc="lower right")
    swept = [row for row in rows if row["microbatch"] * row["accumulate"] == 128]
    styles = {
        "petra": (r"petra-\d+x\d+(-latency-[\d.]+)?", "o-", "tab:blue"),
        "petra, fewer stages": (r"petra-64x2-stages-\d+", "D", "tab:orange"),
        "store": (r"store-\d+x\d+", "s--", "tab:gray"),
    }
    for label, (runs, style, colour) in styles.items():
        line = [row for row in swept if re.fullmatch(runs, row["run"])]
        line.sort(key=num_in_flight)
        at = [*map(num_in_flight, line)]
        right.plot(at, [*map(percent, line)], style, color=colour, label=label, markersize=4)
        for row in line if "petra" in label else []:
            right.annotate(note(row), (num_in_flight(row), percent(row)), **place(row))
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    right.set(xlabel="samples in flight under PETRA", ylabel="test accuracy (%)", ylim=(66, 94))
    right.set_title("by micro-batch, latency and stages, 128 samples an update", fontsize=10)
    right.legend(fontsize=7, loc="lower left")
    save(figure, "short")


def draw_curves(name: str, line: tuple[float, str] | None = None) -> None:
    """Draw the accuracy or loss of all runs of a file over epochs, and a reference line."""
    figure, axis = plt.subplots(figsize=(8, 3.4))
    rows = [row for row in read(name) if "-lr-" not in row["run"]]
    is_loss = rows[0]["metric"] == "loss"
    for row in sorted(rows, key=lambda row: float(row["last"]), reverse=True):
        epochs, _, scores = zip(*row["curve"], strict=True)
        label = f"{row['run']} {row['last']:.2f}" if is_loss else f"{row['run']} {percent(row):.1f}"
        shown = scores if is_loss else [100 * score for score in scores]
        axis.plot(epochs, shown, label=label, linewidth=1.2)
    if line is not None:
        height, text = line
        axis.axhline(height, color="tab:gray", linestyle=":", linewidth=1, label=text)
    if is_loss:
        axis.set(xlabel="epochs", ylabel="test loss (nats a byte)", ylim=(1, 4.5))
    else:
        axis.set(xlabel="epochs", ylabel="test accuracy (%)")
    if max(axis.get_xlim()) > 5:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, name)


def draw_muon(images: list[Row], text: list[Row]) -> None:
    """Draw backprop and PETRA, by the usual optimizer and by Muon: RevNet-18 and Rev-GPT."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
    petra, muon = "petra-64x2", "petra-1x32-8-stages"
    lines = [
        (
            axes[0],
            images,
            {
                "backprop, SGD": "store-64x2",
                "PETRA, SGD": petra,
                "backprop, Muon": "store-64x2-muon-lr-0.05",
                "PETRA, Muon": f"{petra}-muon-lr-0.05",
                "PETRA, Muon, latency 0.5": f"{petra}-muon-latency-0.5-lr-0.05",
            },
        ),
        (
            axes[1],
            text,
            {
                "backprop, AdamW": "store-again",
                "PETRA, AdamW": f"{muon}-plain",
                "backprop, Muon": "store-muon",
                "PETRA, Muon": f"{muon}-muon",
                "PETRA, Muon, latency 0.5": f"{muon}-muon-latency-0.5",
            },
        ),
    ]
    styles = [("-", "tab:gray"), ("--", "tab:gray"), ("-", "tab:orange")]
    styles += [("--", "tab:blue"), ("-", "tab:blue")]
    for axis, rows, runs in lines:
        by_name = {row["run"]: row for row in rows}
        for (label, run), (style, colour) in zip(runs.items(), styles, strict=True):
            row = by_name[run]
            epochs, _, scores = zip(*row["curve"], strict=True)
            is_loss = row["metric"] == "loss"
            last = f"{row['last']:.2f}" if is_loss else f"{percent(row):.1f}"
            shown = scores if is_loss else [100 * score for score in scores]
            axis.plot(epochs, shown, style, color=colour, label=f"{label}: {last}", linewidth=1.4)
        axis.set_xlabel("epochs")
        axis.legend(fontsize=8)
    axes[0].set(ylabel="test accuracy (%)", ylim=(60, 95), title="RevNet-18, CIFAR-10, 10 stages")
    axes[0].xaxis.set_major_locator(ticker.MultipleLocator(5))
    axes[1].set(ylabel="test loss (nats a byte)", title="Rev-GPT small, 20 MB of enwik8, 8 stages")
    save(figure, "muon")


def draw_sooner(rows: list[Row]) -> None:
    """Draw accuracy by epoch, by PETRA and by backprop with Muon, and what is published."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), sharey=True)
    styles = {"petra": ("PETRA", "tab:blue"), "store": ("backprop", "tab:orange")}
    for axis, (model, published) in zip(axes, PUBLISHED.items(), strict=True):
        lengths = sorted({row["epochs"] for row in rows if model_of(row) == model}, reverse=True)
        for length, line in zip(lengths, ("-", ":"), strict=False):
            for method, (label, colour) in styles.items():
                key = model, method, length
                seeds = [r for r in rows if (model_of(r), r["method"], r["epochs"]) == key]
                last = ", ".join(f"{percent(row):.1f}" for row in seeds)
                for number, row in enumerate(seeds):
                    epochs, _, scores = zip(*row["curve"], strict=True)
                    shown = [100 * score for score in scores]
                    text = "" if number else f"{label}, {length:g} epochs: {last}"
                    axis.plot(epochs, shown, line, color=colour, label=text, linewidth=1.2)
        text = f"PETRA, 300 epochs, published: {published}"
        axis.axhline(published, color="tab:gray", linestyle="--", linewidth=0.8, label=text)
        axis.set(xlabel="epochs", ylim=(80, 96), title=f"RevNet-{model[6:]}, CIFAR-10, Muon")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.legend(fontsize=8)
    axes[0].set_ylabel("test accuracy (%)")
    save(figure, "sooner")


def draw_small(rows: list[Row]) -> None:
    """Draw the loss of the tiny Rev-GPT by how late its first stage is, by optimizer."""
    figure, axis = plt.subplots(figsize=(6, 3.4))
    lines = {
        "adamw": ("AdamW, 0.001", "s-", "tab:orange"),
        "adamw-lr-0.003": ("AdamW, 0.003", "s--", "tab:orange"),
        "muon": ("Muon, 0.002", "o-", "tab:blue"),
    }
    for name, (label, line, colour) in lines.items():
        losses: dict[float, list[float]] = {}
        for row in rows:
            # Without changes beside the micro-batch, the stages and the latency.
            usual = rf"(store|petra)-{name}(-\d+x\d+-\d+)?(-latency-0.5)?(-seed\d+)?"
            if re.fullmatch(usual, row["run"]):
                losses.setdefault(updates_late(row), []).append(row["last"])
        late = sorted(losses)
        axis.plot(late, [fmean(losses[x]) for x in late], line, color=colour, label=label)
        for x in late:
            axis.plot([x] * len(losses[x]), losses[x], ".", color=colour, markersize=3)
    axis.set_xscale("symlog", linthresh=0.3)
    axis.set_xticks([0, 0.38, 1.6, 3.2, 6.5], ["backprop", "0.38", "1.6", "3.2", "6.5"])
    axis.minorticks_off()
    axis.set(xlabel="updates late, first stage", ylabel="test loss (nats a byte)")
    axis.legend(fontsize=8)
    save(figure, "small")


def updates_late(row: Row) -> float:
    """Return how many updates late the gradients of the first stage are."""
    if row["method"] != "petra":
        return 0.0
    return float(2 * (row["stages"] - 1) * row["latency"] / row["accumulate"])


def draw_race(rows: list[Row]) -> None:
    """Draw accuracy against wall time: colours by method, line styles by micro-batch."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    colours = {"store": "tab:gray", "reverse": "tab:green", "petra": "tab:blue"}
    lines = {16: ":", 64: "-", 128: "--"}
    by_time = sorted(rows, key=lambda row: row["seconds to 90 %"] or float("inf"))
    for axis, title in zip(axes, ("not compiled", "compiled"), strict=True):
        for row in by_time:
            if row["run"].endswith("-compiled") != (title == "compiled"):
                continue
            _, seconds, scores = zip(*row["curve"], strict=True)
            num_stages = row.get("stages") or NUM_STAGES
            is_petra = row["method"] == "petra"
            method = row["method"] + (f", {num_stages} stages" if is_petra else "")
            seconds_to_90 = f"{row['seconds to 90 %']:.1f} s" if row["seconds to 90 %"] else "never"
            axis.plot(
                seconds,
                [100 * score for score in scores],
                lines[row["microbatch"]],
                color="tab:orange" if is_petra and num_stages > 2 else colours[row["method"]],
                linewidth=1.2,
                label=f"{method}, {row['microbatch']}: {seconds_to_90}",
            )
        axis.axhline(90, color="black", linewidth=0.6)
        axis.set(xlabel="seconds", xlim=(0, 100), ylim=(55, 93), title=title)
        axis.legend(fontsize=8, loc="lower right", title="micro-batch: to 90 %", title_fontsize=8)
    axes[0].set_ylabel("test accuracy (%)")
    save(figure, "race")


def draw_limits(rows: list[Row]) -> None:
    """Draw the largest batch and depth of each backward, as bars."""
    sizes = [size for size in ("batch", "depth") if sum(size in row for row in rows) > 1]
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 2), squeeze=False)
    for axis, size in zip(axes.flat, sizes, strict=True):
        line = [row for row in rows if size in row][::-1]
        bars = axis.barh([row["way"] for row in line], [row[size] for row in line], height=0.6)
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
        axis.set_title(f"largest {size} of Rev-ViT-L", fontsize=10)
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axis.grid(visible=False, axis="y")
        axis.margins(x=0.15)
    save(figure, "limits")


def draw_overlap(rows: list[Row]) -> None:
    """Draw the speed-up of overlap over reverse, by family, size and batch."""
    families = {"ViT": "vit", "Swin": "swin", "MViT": "mvit", "RoBERTa, 512 tokens": "roberta"}
    figure, axes = plt.subplots(1, len(families), figsize=(12, 3), sharex=True, sharey=True)
    for axis, (title, family) in zip(axes, families.items(), strict=True):
        ours = [row for row in rows if row["model"].startswith(f"rev_{family}_")]
        for model in dict.fromkeys(row["model"] for row in ours):
            line = [row for row in ours if row["model"] == model]
            batches, faster = zip(*((row["batch"], row["faster"]) for row in line), strict=True)
            axis.plot(batches, faster, "o-", markersize=4, label=model.rpartition("_")[2])
        axis.axhline(1, color="tab:gray", linewidth=0.8)
        axis.set_xscale("log", base=4)
        axis.xaxis.set_major_locator(ticker.FixedLocator([4**power for power in range(7)]))
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.tick_params(axis="x", labelsize=8)
        axis.set(xlabel="batch", title=title)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("reverse's time / overlap's")
    save(figure, "overlap")


def draw_finetune(rows: list[Row], scores: list[Row]) -> None:
    """Draw the memory of a GPT-2 by layers, and what few bits cost in accuracy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    styles = {
        "checkpoint": ("o-", "tab:gray", "checkpointing"),
        "offload": ("s--", "tab:gray", "checkpoints on the host"),
        "8 bits": ("o-", "tab:green", "8 bits"),
        "3 bits": ("o-", "tab:orange", "3 bits"),
        "2 bits": ("o-", "tab:blue", "2 bits"),
        "1 bit": ("o-", "tab:purple", "1 bit"),
    }
    for run, (style, colour, label) in styles.items():
        line = [row for row in rows if row["run"] == run]
        layers, held = zip(*((row["layers"], row["held MiB"]) for row in line), strict=True)
        label += f": {line[1]['ms']:.0f} ms"
        left.plot(layers, held, style, color=colour, label=label, markersize=4)
    left.set(xlabel="layers", ylabel="MiB between forward and backward", ylim=(0, 3400))
    left.set_xticks(layers)
    left.set_title("GPT-2, width 768, 32 x 1,024 tokens; ms at 24 layers", fontsize=10)
    left.legend(fontsize=8)
    bits = (1, 2, 3, 4, 8)
    losses = {
        own: [row["loss"] for row in scores if row["task"] == "gpt" and row["bits"] == own]
        for own in (0, *bits)
    }
    behind = [fmean(losses[own]) - fmean(losses[0][: len(losses[own])]) for own in bits]
    bars = right.bar([str(own) for own in bits], behind, width=0.6)
    right.bar_label(bars, fmt="{:.4f}", fontsize=8)
    spread = max(losses[0]) - min(losses[0])
    right.axhline(spread, color="tab:gray", linestyle=":", label="between plain runs")
    right.set(xlabel="bits a value", ylabel="nats behind plain fine-tuning")
    right.set_title("GPT-2 small, fine-tuned on WikiText-2 bytes", fontsize=10)
    right.legend(fontsize=8)
    save(figure, "finetune")


def draw_budget(rows: list[Row]) -> None:
    """Draw the time of a step, of store's, against its peak: plans, by hand, torch's setting."""
    titles = {"rev_vit_large": "Rev-ViT-L, batch 64", "rev_gpt_small": "Rev-GPT small, 8 x 1,024"}
    styles = {
        "plan": ("o-", "tab:blue", 2.2),
        "by hand, reverse": ("s--", "tab:green", 1),
        "by hand, overlap": ("D--", "tab:olive", 1),
        "by hand, save": ("v--", "tab:cyan", 1),
        "by hand, checkpoint": ("^--", "tab:gray", 1),
        "torch": ("x", "tab:red", 1),
        "store": ("*", "black", 1),
    }
    labels = {"plan": "rd.plan", "torch": "torch's activation_memory_budget"}
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
    for axis, (model, title) in zip(axes, titles.items(), strict=True):
        own = [row for row in rows if row["model"] == model]
        [store_ms] = [row["ms"] for row in own if row["how"] == "store"]
        for how, (style, colour, width) in styles.items():
            line = [row for row in own if row["how"] == how]
            peaks = [row["peak MiB"] for row in line]
            # A row that was measured on another machine has the time of `store` there.
            times = [row["ms"] / row.get("store ms", store_ms) for row in line]
            label = labels.get(how, how)
            axis.plot(peaks, times, style, color=colour, linewidth=width, markersize=5, label=label)
        axis.set(xlabel="MiB at the peak", ylabel="time of a step, of store's", title=title)
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "budget")


def draw_grid_of_links(rows: list[Row]) -> None:
    """Draw throughput by number of stages and time of a hop: measured points, simulated lines."""
    styles = {
        ("petra", 0.5, True): ("--", "tab:blue", "PETRA, latency 0.5"),
        ("petra", 1, True): ("-", "tab:blue", "PETRA, latency 1"),
        ("petra", 2, True): (":", "tab:blue", "PETRA, latency 2"),
        ("1f1b", 1, False): ("-", "tab:orange", "1F1B"),
        ("1f1b", 1, True): ("--", "tab:orange", "1F1B, recomputed"),
    }
    full = FORWARD + BACKWARD  # seconds of a micro-batch on a device that never waits
    hops = sorted({row["hop ms"] for row in rows})
    figure, axes = plt.subplots(1, len(hops), figsize=(11, 3.4), sharey=True)
    for axis, hop in zip(axes, hops, strict=True):
        for (method, latency, recompute), (style, colour, label) in styles.items():
            shares = [
                100 * full * _simulate(method, num, latency, hop / 1000, recompute)
                for num in SIMULATED
            ]
            axis.plot(SIMULATED, shares, style, color=colour, linewidth=1.3, label=label)
            own = [
                (row["stages"], 100 * full * row["measured"])
                for row in rows
                if (row["method"], row["latency"], row["recompute"], row["hop ms"])
                == (method, latency, recompute, hop)
            ]
            axis.plot(*zip(*own, strict=True), "o", color=colour, markersize=5)
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIMULATED, [str(num) for num in SIMULATED])
        axis.set(xlabel="stages", title=f"{hop:g} ms a hop", ylim=(0, 100))
    axes[0].set_ylabel("share of full throughput (%)")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "grid")


def _simulate(method: str, num: int, latency: float, hop: float, recompute: bool) -> float:
    """Return micro-batches per second; PETRA's backward includes what it computes again."""
    is_petra = method == "petra"
    return rd.simulate(
        method,
        num,
        K,
        forward=FORWARD,
        backward=BACKWARD + FORWARD * is_petra,
        latency=latency,
        hop=hop,
        rendezvous=True,
        recompute=recompute and not is_petra,
    ).throughput


def draw_quality(rows: list[Row]) -> None:
    """Draw cosine and norm of PETRA's gradients against backprop's, by stage, time and k."""
    probed = sorted(rows, key=lambda row: row["accumulate"])
    styles = {
        "cosine": ("cosine to backprop's gradient", Normalize(-0.2, 1), "viridis"),
        "ratio": ("its norm / backprop's", TwoSlopeNorm(1, 0.5, 1.75), "RdBu_r"),
    }
    figure, axes = plt.subplots(
        len(styles), len(probed), figsize=(4.2 * len(probed), 6), sharex="col", sharey=True
    )
    for line, (key, (label, norm, colours)) in zip(axes, styles.items(), strict=True):
        for axis, row in zip(line, probed, strict=True):
            draw_grid(axis, row["quality"], key, norm, colours)
        line[0].set_ylabel("stage (0: the first)")
        figure.colorbar(line[0].images[0], ax=line, label=label)
    for axis, row in zip(axes[0], probed, strict=True):
        axis.set_title(f"k = {row['accumulate']}")
    for axis in axes[-1]:
        axis.set_xlabel("micro-batches")
    save(figure, "quality", tight=False)


def draw_grid(axis: Any, samples: list[Row], key: str, norm: Any, colours: str) -> None:
    """Draw one key of the samples by stage and time, in colours and numbers."""
    times = sorted({sample["microbatch"] for sample in samples})
    grid = [[0.0] * len(times) for _ in range(NUM_STAGES)]
    for sample in samples:
        grid[sample["stage"]][times.index(sample["microbatch"])] = sample[key]
    half = (times[1] - times[0]) / 2
    edges = (times[0] - half, times[-1] + half, -0.5, NUM_STAGES - 0.5)
    shown = axis.imshow(grid, norm=norm, cmap=colours, aspect="auto", origin="lower", extent=edges)
    for stage, values in enumerate(grid):
        for time, value in zip(times, values, strict=True):
            if abs(value - 1) < 0.02:
                continue  # equal to backprop's, or nearly: leave the cell empty
            red, green, blue, _ = shown.to_rgba(value)
            ink = "black" if red + green + blue > 1.2 else "white"
            axis.text(time, stage, f"{value:.2f}", ha="center", va="center", fontsize=5, color=ink)
    axis.grid(visible=False)
    axis.yaxis.set_major_locator(ticker.MultipleLocator(1))


def save(figure: Any, name: str, *, tight: bool = True) -> None:
    """Write a figure as SVG, without a date, so that equal figures are equal files."""
    if tight:
        figure.tight_layout()
    figure.savefig(path_of(name, "svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    draw_short(read("short"))
    draw_quality(read("quality"))
    draw_overlap(read("overlap"))
    draw_curves("revnet18", line=(PUBLISHED["revnet18"], "published, both"))
    draw_curves("revnet34")
    draw_curves("revnet50")
    draw_curves("vit")
    draw_curves("gpt")
    draw_muon(read("short") + read("muon"), read("gpt"))
    draw_sooner(read("sooner") + read("deeper"))
    draw_small(read("small"))
    draw_race(read("race"))
    draw_limits(read("limits"))
    draw_finetune(read("finetune"), read("accuracy"))
    draw_budget(read("budget"))
    draw_grid_of_links(read("grid"))
