"""Trainings of a claim: each in a folder of its own, those that have ended not again."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from redivider.train.build import resolved
from redivider.train.errors import TrainError
from redivider.train.folder import write_whole
from redivider.train.loop import Stopped, train
from redivider.train.recipe import Recipe, read_recipe
from redivider.train.runs import LOG, RECIPE, numbers, read_run
from redivider.train.torchrun import num_processes

RESULTS = "results.jsonl"
FAILED = "failed.txt"  # why a run has come to nothing
WANTED = 0.9  # an accuracy, for a race to it
# What makes runs of one claim differ, and is told of each.
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
    """Train by each recipe in `folder`, under its name; returns a row for each.

    A run that has stopped goes on, and one that has ended is only read. After each of them
    `results.jsonl` has a row for every run in the folder that has ended, also of other processes.
    Where a loss is not a number, the row says so, and the other recipes follow.

    Raises:
        Stopped: If somebody has asked for it; the run is saved, or has ended.
    """
    read_results(folder)  # which must be whole, and says so before hours have passed
    rows: list[dict[str, Any]] = []
    for recipe in map(resolved, recipes):
        where, is_last = folder / recipe.name, False
        _verify_same(recipe, where)
        if not (where / FAILED).exists():
            try:
                is_last = train(recipe, where, resume=(where / RECIPE).exists()).is_last
            except TrainError as error:
                if not isinstance(error.__cause__, FloatingPointError):
                    raise
                write_whole(where / FAILED, f"{error}\n")
        rows.append(read_row(where))
        measured = [row for row in read_results(folder) if "method" not in row]
        write_rows([*measured, *read_rows(folder)], folder)
        if is_last:
            raise Stopped(f"stopped after {recipe.name}, which has ended", folder)
    return rows


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """A row for every run in a folder that has ended, by their names."""
    runs = sorted(path.parent for path in folder.glob(f"*/{LOG}"))  # one may just begin
    return [read_row(each) for each in runs if (each / FAILED).exists() or read_run(each).end]


def read_row(folder: Path) -> dict[str, Any]:
    """What a run that has ended comes to."""
    run = read_run(folder)
    if (folder / FAILED).exists():
        return {**_told(folder), "failed": (folder / FAILED).read_text().strip()}
    metric, start, end = run.metric, run.start[-1], run.end[-1]
    scores = numbers(run.evaluate, metric)
    epochs, seconds = numbers(run.evaluate, "epoch"), numbers(run.evaluate, "seconds")
    finite, held = [each for each in scores if isfinite(each)], run.held("activations")
    if not finite or end[metric] is None:
        return {**_told(folder), "failed": f"the {metric} is not a number"}
    curve = [
        [round(e, 3), round(s, 2), round(score, 5)]
        for e, s, score in zip(epochs, seconds, scores, strict=True)
        if isfinite(score)
    ]
    row: dict[str, Any] = {
        **_told(folder),
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
        row["seconds to 90 %"] = next((s for _, s, score in curve if score >= WANTED), None)
    if run.quality:
        row["quality"] = _by_stage(run.quality)
    return row


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The rows that `results.jsonl` has, if it is there."""
    path = folder / RESULTS
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise TrainError(
            f"{path} has a line that is no JSON ({error}); take that line out, or the file away"
        ) from error


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Put them into `results.jsonl`, an object a line."""
    write_whole(folder / RESULTS, "".join(json.dumps(each) + "\n" for each in rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown; what is long is for the file alone."""
    long = ("curve", "quality", "device", "torch", "metric")
    shown = [{k: v for k, v in row.items() if k not in long} for row in rows]
    heads = list(dict.fromkeys(key for row in shown for key in row))
    scores = ("last", "best")
    always = ("run", *scores, "seconds", "MiB", "seconds to 90 %")
    heads = [
        each for each in heads if len({str(row.get(each)) for row in shown}) > 1 or each in always
    ]
    metrics = {row["metric"] for row in rows if "metric" in row}
    of = f" {metrics.pop()}" if len(metrics) == 1 else ""
    lines = [[f"{each}{of}" if each in scores else each for each in heads]]
    lines += [["---"] * len(heads)]
    lines += [[_text(row.get(each)) for each in heads] for row in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verify_same(recipe: Recipe, where: Path) -> None:
    """Refuse to go on with a run of another recipe."""
    if not (where / RECIPE).exists():
        return
    ours, theirs = asdict(recipe), asdict(read_recipe(where / RECIPE))
    if _can_be_cut_so(ours["stages"], theirs["stages"]):
        ours["stages"] = theirs["stages"]
    others = [name for name in ours if ours[name] != theirs[name]]
    if others:
        raise TrainError(
            f"{where} holds a run with another {', '.join(others)}; take another folder by --out"
        )


def _can_be_cut_so(asked: Any, cut: Any) -> bool:
    """Whether stages that were asked for are these: a run writes down the units of each."""
    if asked == "auto" and num_processes() > 1:
        return True  # one for each of them, however many there were
    return isinstance(cut, tuple) and (set(cut) == {1} if asked == "auto" else asked == len(cut))


def _told(folder: Path) -> dict[str, Any]:
    recipe = read_recipe(folder / RECIPE)  # with defaults for what is younger than it
    return {"run": recipe.name, **{each: getattr(recipe, each) for each in FIELDS}}


def _by_stage(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples of gradient quality, without what is the same in all of them."""
    wanted = ("microbatch", "stage", "cosine", "ratio", "cosine_to_delayed", "rebuilt_error")
    return [{key: _rounded(row[key]) for key in wanted} for row in rows]


def _rounded(value: float | None) -> float | None:
    return round(value, 5) if isinstance(value, float) else value


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
