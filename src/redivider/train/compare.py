"""Comparison of methods: train the same recipe by each of them, for one table."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from redivider.checks.report import format_table
from redivider.models.catalogue import resolve
from redivider.train.build import build, resolved
from redivider.train.engine import PipelineEngine
from redivider.train.errors import SharedError
from redivider.train.log import Log
from redivider.train.loop import Result, Stopped, train
from redivider.train.machine import report_out_of_memory, using_threads
from redivider.train.progress import tell
from redivider.train.recipe import Recipe
from redivider.train.report import write_report
from redivider.train.run_folder import claim, write_whole
from redivider.train.runs import RECIPE, Run, read_run
from redivider.train.torchrun import num_processes

REPORT = "report.html"


@dataclass(frozen=True)
class Row:
    """Row of the table, for one method."""

    name: str
    result: Result
    run: Run

    @property
    def held(self) -> int | None:
        """Bytes of activations of all stages, between forward and backward or between two ticks."""
        held = self.run.held("activations")
        return int(sum(held)) if held else None


def compare(
    recipe: Recipe, folder: Path, *, resume: bool = False, numbered: bool = False
) -> tuple[Path, list[Row]]:
    """Train by each method of the recipe, in a folder each, and write a report of all.

    Args:
        recipe: Recipe with the methods to compare.
        folder: Folder of the comparison; `folder`, `resume` and `numbered` are as in `train`.
        resume: Resume a comparison that was stopped.
        numbered: If the folder exists, use one with a number instead.

    Returns:
        The folder, and the rows of the table.
    """
    if num_processes() > 1:
        raise SharedError(
            "a comparison runs in one process; train by one method under torchrun, such as "
            "--method petra"
        )
    recipe = resolved(recipe)
    runs = variants(recipe)
    if not resume:
        for _, variant in runs:  # do not start the first if a later one cannot be built
            with report_out_of_memory(variant, variant.device):
                build(variant)
        folder = claim(folder, numbered=numbered)
        write_whole(folder / RECIPE, recipe.to_json())
    results = {}
    try:
        for name, variant in runs:
            path = folder / name.replace(", ", "-")
            results[name] = train(variant, path, resume=resume and (path / RECIPE).exists())
            if results[name].is_last:
                raise Stopped(f"stopped after {name}, which has ended", folder)
        for name, variant in runs:
            if "," not in name:  # the captured variant of a method would measure the same again
                _log_depths(variant, results[name].folder)
        tell(recipe.name, "writing the report")
        write_report([result.folder for result in results.values()], folder / REPORT)
        return folder, [
            Row(name, result, read_run(result.folder)) for name, result in results.items()
        ]
    except (KeyboardInterrupt, Stopped) as stopped:
        raise Stopped(str(stopped) or "interrupted", folder) from None


def variants(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Return the runs of a comparison as names and recipes.

    On a GPU, ticks with a probe are not captured: such a pipeline is trained a second time without
    the probe.
    """
    runs: list[tuple[str, Recipe]] = []
    for method in recipe.compare:
        variant = replace(recipe, method=method, compare=())
        runs.append((method, variant))
        can_capture = variant.capture and variant.device.startswith("cuda")
        if variant.is_pipeline and variant.probe_every and can_capture:
            runs.append((f"{method}, captured", replace(variant, probe_every=0)))
    return runs


def _log_depths(recipe: Recipe, folder: Path) -> None:
    """Add the memory by depth to the log of a run, unless it is there."""
    run = read_run(folder)
    if run.depth:
        return
    step = run.end[-1]["step"]
    with using_threads(recipe.threads):
        sizes = measure_depths(recipe)
    log = Log(folder, resume_step=step)
    for depth, size in sizes.items():
        log.write("depth", step=step, depth=depth, activations=size)
    log.close()


def measure_depths(recipe: Recipe) -> dict[int, int]:
    """Return the bytes of activations that the method holds, by the depth of the model."""
    sizes = {}
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
            # Fill the pipeline: it holds most when all stages have micro-batches in flight.
            for step in range(engine.pipe.schedule.num_in_flight + 2):
                engine.step(*engine.task.train[step])
        held = engine.holdings()
        assert held is not None, "the pipeline is full"
        sizes[depth] = sum(holding.activations + holding.messages for holding in held)
        name = f"{recipe.name}, {recipe.method}"
        tell(name, f"{_mib(sizes[depth])} of activations at depth {depth}")
    return sizes


def _deepened(recipe: Recipe, depth: int) -> Recipe:
    """Return the recipe with a model of `depth` couplings or layers."""
    if "depths" in {field.name for field in fields(resolve(recipe.model)[0].options)}:
        return replace(recipe, depths=(depth,))
    return replace(recipe, model_options={**recipe.model_options, "depth": depth})


def table(rows: Sequence[Row]) -> str:
    """Format the table of a comparison."""
    depths = list(rows[0].run.held_by_depth()) if rows else []
    has_accuracy = any(row.result.score.accuracy is not None for row in rows)
    heads = ["method", "accuracy" if has_accuracy else "loss", "seconds", "activations"]
    heads += [f"at depth {depth}" for depth in depths]
    lines = [heads]
    for row in rows:
        score = row.result.score
        metric = f"{score.loss:.3f}" if score.accuracy is None else f"{score.accuracy:.1%}"
        cells = [row.name, metric, f"{row.result.seconds:.1f}", _mib(row.held)]
        held = row.run.held_by_depth()
        lines.append([*cells, *(_mib(held.get(depth)) for depth in depths)])
    return format_table(lines)


def _mib(size: int | None) -> str:
    return "\N{EN DASH}" if size is None else f"{size / 2**20:.2f} MiB"
