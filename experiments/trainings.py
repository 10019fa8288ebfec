"""Trainings of a claim: one folder per run, and finished runs are not repeated."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from redivider.train.build import resolved
from redivider.train.errors import TrainError
from redivider.train.loop import Stopped, train
from redivider.train.recipe import Recipe, read_recipe
from redivider.train.run_folder import write_whole
from redivider.train.runs import LOG, RECIPE, numbers, read_run
from redivider.train.torchrun import num_processes

RESULTS = "results.jsonl"
FAILED = "failed.txt"  # reason why a run failed
# Accuracies of which a race compares the times: columns of the results.
WANTED = {"seconds to 90 %": 0.9, "seconds to 93 %": 0.93, "seconds to 94 %": 0.94}
# Fields in which the runs of a claim may differ: columns of the results.
FIELDS = (
    "method",
    "microbatch",
    "accumulate",
    "lr",
    "lr_by_delay",
    "latency",
    "lookahead",
    "epochs",
    "precision",
    "seed",
)


def train_all(recipes: Sequence[Recipe], folder: Path) -> list[dict[str, Any]]:
    """Train each recipe in the subfolder of its name, and return one row per recipe.

    Resume stopped runs, and only read finished ones. After each run `results.jsonl` has a row for
    every finished run in the folder, including those of other processes. If a loss is NaN, the row
    says so and the next recipe follows.

    Raises:
        Stopped: If the user stopped the run; it is saved, or finished.
    """
    read_results(folder)  # a damaged file must raise now, and not after hours of training
    rows: list[dict[str, Any]] = []
    for recipe in map(resolved, recipes):
        run_folder, is_last = folder / recipe.name, False
        _verify_same(recipe, run_folder)
        if not (run_folder / FAILED).exists():
            try:
                resume = (run_folder / RECIPE).exists()
                is_last = train(recipe, run_folder, resume=resume).is_last
            except TrainError as error:
                if not isinstance(error.__cause__, FloatingPointError):
                    raise
                write_whole(run_folder / FAILED, f"{error}\n")
        rows.append(read_row(run_folder))
        # Measurements of another claim may be in the same file.
        measured = [row for row in read_results(folder) if "method" not in row]
        write_rows([*measured, *read_rows(folder)], folder)
        if is_last:
            raise Stopped(f"stopped after {recipe.name}, which has ended", folder)
    return rows


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return a row for every finished run in a folder, sorted by name."""
    # Those with a log: another process may have just created a folder.
    runs = sorted(path.parent for path in folder.glob(f"*/{LOG}"))
    return [read_row(run) for run in runs if (run / FAILED).exists() or read_run(run).end]


def read_row(folder: Path) -> dict[str, Any]:
    """Return the results of a finished run."""
    run = read_run(folder)
    if (folder / FAILED).exists():
        return {**_settings(folder), "failed": (folder / FAILED).read_text().strip()}
    metric, start, end = run.metric, run.start[-1], run.end[-1]
    scores = numbers(run.evaluate, metric)
    epochs, seconds = numbers(run.evaluate, "epoch"), numbers(run.evaluate, "seconds")
    finite, held = [score for score in scores if isfinite(score)], run.held("activations")
    if not finite or end[metric] is None:
        return {**_settings(folder), "failed": f"the {metric} is NaN or infinite"}
    curve = [
        [round(epoch, 3), round(second, 2), round(score, 5)]
        for epoch, second, score in zip(epochs, seconds, scores, strict=True)
        if isfinite(score)
    ]
    row: dict[str, Any] = {
        **_settings(folder),
        "stages": len(start["cut"]) if start.get("cut") else None,
        "metric": metric,
        "last": round(end[metric], 5),
        "best": round(max(finite) if metric == "accuracy" else min(finite), 5),
        "seconds": round(end["seconds"], 2),
        "MiB": round(sum(held) / 2**20, 2) if held else None,
        "device": start["device"],
        "torch": start["torch"],
        "curve": curve,
    }
    if metric == "accuracy":
        for column, wanted in WANTED.items():
            reached = (second for _, second, score in curve if score >= wanted)
            row[column] = next(reached, None)
    if run.quality:
        row["quality"] = _by_stage(run.quality)
    return row


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `results.jsonl`, or none if it does not exist."""
    path = folder / RESULTS
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise TrainError(
            f"{path} has a line that is no JSON ({error}); take that line out, or the file away"
        ) from error


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows to `results.jsonl`, one JSON object per line."""
    write_whole(folder / RESULTS, "".join(json.dumps(row) + "\n" for row in rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a markdown table, without the long values and the columns that are equal."""
    long = ("curve", "quality", "device", "torch", "metric")
    shown = [{k: v for k, v in row.items() if k not in long} for row in rows]
    heads = list(dict.fromkeys(key for row in shown for key in row))
    scores = ("last", "best")
    always = ("run", *scores, "seconds", "MiB", *WANTED)
    heads = [
        head for head in heads if head in always or len({str(row.get(head)) for row in shown}) > 1
    ]
    metrics = {row["metric"] for row in rows if "metric" in row}
    metric = f" {metrics.pop()}" if len(metrics) == 1 else ""
    lines = [[f"{head}{metric}" if head in scores else head for head in heads]]
    lines += [["---"] * len(heads)]
    lines += [[_text(row.get(head)) for head in heads] for row in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verify_same(recipe: Recipe, folder: Path) -> None:
    """Refuse to resume a run of another recipe."""
    if not (folder / RECIPE).exists():
        return
    asked, saved = asdict(recipe), asdict(read_recipe(folder / RECIPE))
    if _is_cut_of(saved["stages"], asked["stages"]):
        asked["stages"] = saved["stages"]
    differing = [name for name in asked if asked[name] != saved[name]]
    if differing:
        raise TrainError(
            f"{folder} holds a run with another {', '.join(differing)}; take another folder by "
            "--out"
        )


def _is_cut_of(cut: Any, stages: Any) -> bool:
    """Return True if the cut that a run has saved results from the `stages` of its recipe.

    A run saves the number of units of every stage, whatever form the recipe has.
    """
    if stages == "auto" and num_processes() > 1:
        return True  # one stage per process, and the run may have had another number of processes
    return isinstance(cut, tuple) and (set(cut) == {1} if stages == "auto" else stages == len(cut))


def _settings(folder: Path) -> dict[str, Any]:
    recipe = read_recipe(folder / RECIPE)  # an older one gets defaults for newer fields
    return {"run": recipe.name, **{field: getattr(recipe, field) for field in FIELDS}}


def _by_stage(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples of gradient quality, without keys that are the same in all of them."""
    keys = ("microbatch", "stage", "cosine", "ratio", "cosine_to_delayed", "rebuilt_error")
    return [{key: _round(row[key]) for key in keys} for row in rows]


def _round(value: float | None) -> float | None:
    return round(value, 5) if isinstance(value, float) else value


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
