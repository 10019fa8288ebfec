"""Methods beside each other: the same recipe by each of them, in one table."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from redivider.models.catalogue import resolve
from redivider.train.build import build, resolved
from redivider.train.crew import said_once
from redivider.train.engine import PipelineEngine
from redivider.train.errors import TrainError
from redivider.train.folder import claim, write_whole
from redivider.train.loop import Result, Stopped, train
from redivider.train.machine import using_threads, within_memory
from redivider.train.progress import tell
from redivider.train.recipe import Recipe
from redivider.train.report import write_report
from redivider.train.runs import RECIPE, read_run
from redivider.train.torchrun import num_processes

REPORT = "report.html"


@dataclass(frozen=True)
class Row:
    """A method's line of the table."""

    name: str
    result: Result
    held: int | None
    """Bytes of activations: between forward and backward, or two ticks, of all stages."""
    by_depth: dict[int, int]


def compare(
    recipe: Recipe, folder: Path, *, resume: bool = False, numbered: bool = False
) -> tuple[Path, list[Row]]:
    """Train by each method of the recipe, in folders of their own, and write a report of all.

    Args:
        recipe: What to do.
        folder: Where to; folder, `resume` and `numbered` as for `train`.
        resume: Go on with a comparison.
        numbered: Take a folder with a number instead, if this one is there already.

    Returns:
        The folder, and the rows of the table.
    """
    if num_processes() > 1:
        raise said_once(
            TrainError(
                "a comparison runs in one process; train by one method under torchrun, such as "
                "--method petra"
            )
        )
    recipe = resolved(recipe)
    runs = variants(recipe)
    if not resume:
        for _, each in runs:  # none is begun if one of them cannot be
            with within_memory(each, each.device):
                build(each)
        folder = claim(folder, numbered=numbered)
        write_whole(folder / RECIPE, recipe.to_json())
    results = {}
    try:
        for name, each in runs:
            where = folder / name.replace(", ", "-")
            results[name] = train(each, where, resume=resume and (where / RECIPE).exists())
            if results[name].is_last:
                raise Stopped(f"stopped after {name}, which has ended", folder)
        tell(recipe.name, "writing the report")
        write_report([each.folder for each in results.values()], folder / REPORT)
        rows = []
        for name, each in runs:
            held = read_run(results[name].folder).held("activations")
            with using_threads(each.threads):
                depths = {} if "," in name else measure_depths(each)
            rows.append(Row(name, results[name], int(sum(held)) if held else None, depths))
        return folder, rows
    except (KeyboardInterrupt, Stopped) as stopped:
        raise Stopped(str(stopped) or "interrupted", folder) from None


def variants(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Each method; on a GPU, pipelines that a probe keeps from being captured once more without."""
    found: list[tuple[str, Recipe]] = []
    for method in recipe.compare:
        each = replace(recipe, method=method, compare=())
        found.append((method, each))
        can_capture = each.capture and each.device.startswith("cuda")
        if each.is_pipeline and each.probe_every and can_capture:
            found.append((f"{method}, captured", replace(each, probe_every=0)))
    return found


def measure_depths(recipe: Recipe) -> dict[int, int]:
    """Return the bytes of activations that the method holds, by the depth of the model."""
    found = {}
    num_stages = recipe.stages
    if recipe.is_pipeline and recipe.compare_depths and num_stages == "auto":
        num_stages = len(list(build(recipe).task.body.units()))
    for depth in recipe.compare_depths:
        deep = replace(_deepened(recipe, depth), probe_every=0, capture=False, stages="auto")
        if recipe.is_pipeline:
            num_units = len(list(build(replace(deep, method="store")).task.body.units()))
            num = num_stages if isinstance(num_stages, int) else len(num_stages)
            deep = replace(deep, stages=min(num_units, num))
        engine = build(deep)
        if isinstance(engine, PipelineEngine):
            for step in range(2 * deep.latency * len(engine.pipe.stages)):
                engine.step(*engine.task.train[step])
        held = engine.holdings()
        assert held is not None, "the pipeline is full"
        found[depth] = sum(each.activations + each.messages for each in held)
        name = f"{recipe.name}, {recipe.method}"
        tell(name, f"{_mib(found[depth])} of activations at depth {depth}")
    return found


def _deepened(recipe: Recipe, depth: int) -> Recipe:
    """The same model with so many couplings or layers."""
    if "depths" in {each.name for each in fields(resolve(recipe.model)[0].options)}:
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
    return "\N{EN DASH}" if size is None else f"{size / 2**20:.2f} MiB"
