"""Methods beside each other: the same recipe by each of them, in one table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from redivider.train.engine import PipelineEngine, make_engine
from redivider.train.errors import TrainError
from redivider.train.loop import Result, train
from redivider.train.machine import resolve_device
from redivider.train.recipe import Method, Recipe
from redivider.train.report import write_report
from redivider.train.runs import RECIPE, read_run
from redivider.train.schedule import Schedule
from redivider.train.task import make_task

DEFAULT: tuple[Method, ...] = ("store", "checkpoint", "reverse", "petra")
REPORT = "report.html"


@dataclass(frozen=True)
class Row:
    """A method's line of the table."""

    name: str
    result: Result
    held: int
    """Bytes of activations: between forward and backward, or between two ticks of all stages."""
    by_depth: dict[int, int]


def compare(recipe: Recipe, folder: Path, *, resume: bool = False) -> list[Row]:
    """Train by each method of the recipe, in folders of their own; write a report of all."""
    unknown = [each for each in recipe.compare if each not in get_args(Method)]
    if unknown:
        raise TrainError(f"there is no method {unknown[0]!r}; it is one of {get_args(Method)}")
    device = resolve_device(recipe.device)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(recipe.to_json())
    rows = []
    for name, each in _variants(recipe, device):
        where = folder / name.replace(", ", "-")
        result = train(each, where, resume=resume and (where / RECIPE).exists())
        held = int(sum(read_run(where).held("activations")))
        depths = {} if "," in name else measure_depths(each, device)
        rows.append(Row(name, result, held, depths))
    write_report([row.result.folder for row in rows], folder / REPORT)
    return rows


def _variants(recipe: Recipe, device: torch.device) -> list[tuple[str, Recipe]]:
    """Each method; on a GPU, the fastest of both kinds once more, captured.

    A pipeline that is probed, and one that is traced, runs tick by tick.
    """
    found: list[tuple[str, Recipe]] = [
        (method, replace(recipe, method=method, compare=(), capture=False))
        for method in recipe.compare
    ]
    if device.type == "cuda":
        found += [
            (
                f"{method}, captured",
                replace(recipe, method=method, compare=(), capture=True, probe_every=0),
            )
            for method in recipe.compare
            if method in ("store", "petra")
        ]
    return found


def measure_depths(recipe: Recipe, device: torch.device) -> dict[int, int]:
    """Bytes of activations that the method holds, by the depth of the model."""
    found = {}
    stages = recipe.stages
    if recipe.is_pipeline and stages == "auto":
        stages = len(list(make_task(recipe, device).body.units()))
    for depth in recipe.compare_depths:
        deep = replace(_deepened(recipe, depth), stages=stages, probe_every=0)
        task = make_task(deep, device)
        engine = make_engine(deep, task, Schedule(deep, 1.0, 1))
        if isinstance(engine, PipelineEngine):
            for step in range(2 * deep.latency * len(engine.pipe.stages)):
                engine.step(*task.train[step])
        held = engine.holdings()
        assert held is not None, "the pipeline is full"
        found[depth] = sum(each.activations + each.messages for each in held)
    return found


def _deepened(recipe: Recipe, depth: int) -> Recipe:
    """The same model with so many couplings or layers."""
    if "net" in recipe.model:
        return replace(recipe, depths=(depth,))
    return replace(recipe, model_options={**recipe.model_options, "depth": depth})


def table(rows: Sequence[Row]) -> str:
    """The table that a comparison ends with."""
    depths = list(rows[0].by_depth) if rows else []
    has_accuracy = any(row.result.score.accuracy is not None for row in rows)
    heads = ["method", "accuracy" if has_accuracy else "loss", "seconds", "activations"]
    heads += [f"at depth {depth}" for depth in depths]
    lines = [heads]
    for row in rows:
        score = row.result.score
        shown = f"{score.loss:.3f}" if score.accuracy is None else f"{score.accuracy:.1%}"
        cells = [row.name, shown, f"{row.result.seconds:.1f}", _mib(row.held)]
        lines.append([*cells, *(_mib(row.by_depth.get(depth)) for depth in depths)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.2f} MiB"
