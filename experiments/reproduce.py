"""Trainings or measurements of one claim, and the table of their results."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from claims import Claim

from redivider.errors import did_you_mean
from redivider.train.errors import TrainError
from redivider.train.overrides import override
from redivider.train.recipe import Recipe


def reproduce(
    claim: Claim, folder: Path, *, only: Sequence[str], seeds: int, fields: Sequence[str]
) -> str:
    """Run what is not yet in `folder`, and return a table.

    Args:
        claim: The claim to test.
        folder: Destination of the runs and of `results.jsonl`.
        only: Names of the runs, of the models to measure, or of scripts; all if empty.
        seeds: Number of seeds to train with, from 0 on.
        fields: Fields of recipes as `redivider train` takes them, set in all runs.
    """
    from scripts import run_scripts
    from trainings import read_results, table, train_all, write_rows

    if claim.runs:
        return table(train_all(choose(claim, only, seeds, fields), folder))
    if fields or seeds != 1:
        raise TrainError(f"{claim.name} is measured, not trained: it has no seeds and no fields")
    from redivider.train.machine import resolve_device

    module = import_module(claim.measurement) if claim.measurement else None
    _verify_names(claim, only, claim.names if module is None else module.NAMES)
    device = resolve_device("auto")
    if claim.on_gpu and device.type != "cuda":
        raise TrainError(f"{claim.name} measures a GPU, and there is none here")
    if module is None:
        return run_scripts(claim, folder, only)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {row["run"]: row for row in read_results(folder)}
    for name in only or module.NAMES:
        for row in module.measure(name, device, rows):
            print(row, flush=True)
            rows[row["run"]] = row
            write_rows(list(rows.values()), folder)
    return table([row for row in rows.values() if _is_named(row, only or module.NAMES)])


def choose(claim: Claim, only: Sequence[str], seeds: int, fields: Sequence[str]) -> list[Recipe]:
    """Return the recipes to train, for each seed; names have no suffix for seed 0."""
    _verify_names(claim, only, claim.names)
    chosen = []
    for offset in range(seeds):
        for run in claim.runs:
            if only and run.name not in only:
                continue
            recipe = override(run, fields) if fields else run
            _verify_fields(claim, run, recipe)
            seed = recipe.seed + offset
            name = f"{run.name}-seed{seed}" if seed else run.name
            chosen.append(replace(recipe, seed=seed, name=name))
    return chosen


def _is_named(row: dict[str, Any], names: Sequence[str]) -> bool:
    return row["run"] in names or row.get("model") in names


def _verify_names(claim: Claim, only: Sequence[str], names: Sequence[str]) -> None:
    for name in only:
        if name not in names:
            otherwise = f"it has {', '.join(names)}"
            raise TrainError(
                f"{claim.name} has no run {name!r}; {did_you_mean(name, names, otherwise)}"
            )


def _verify_fields(claim: Claim, run: Recipe, recipe: Recipe) -> None:
    """Refuse fields in which the runs of the claim differ, because their names would be wrong."""
    for field in asdict(recipe):
        values = [getattr(other, field) for other in claim.runs]
        is_changed = getattr(recipe, field) != getattr(run, field)
        if is_changed and any(value != values[0] for value in values):
            raise TrainError(
                f"{claim.name} compares runs of several --{field.replace('_', '-')}; choose among "
                "them by --only, or train another one by `redivider train`"
            )
