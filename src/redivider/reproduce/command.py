"""`redivider reproduce`: a claim's trainings or measurements, again, and their table."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from redivider.reproduce.claims import Claim
from redivider.train.errors import TrainError, hint
from redivider.train.fields import override
from redivider.train.recipe import Recipe


def reproduce(
    claim: Claim, folder: Path, *, only: Sequence[str], seeds: int, fields: Sequence[str]
) -> str:
    """Do it in `folder`, which may have some of it already; returns a table.

    Args:
        claim: Which.
        folder: Where runs go, and `results.jsonl`.
        only: Names of some runs, or of some models of a measurement; all unless given.
        seeds: Of trainings: so many, from 0 on.
        fields: Of recipes, as `redivider train` takes them, for all runs.
    """
    from redivider.reproduce.trainings import read_results, table, train_all, write_rows

    if claim.runs:
        return table(train_all(choose(claim, only, seeds, fields), folder))
    if fields or seeds != 1:
        raise TrainError(f"{claim.name} is measured, not trained: it has no seeds and no fields")
    from redivider.train.machine import resolve_device

    module = import_module(f"redivider.reproduce.{claim.measurement}")
    _verify_names(claim, only, module.NAMES)
    device = resolve_device("auto")
    if device.type != "cuda":
        raise TrainError(f"{claim.name} measures a GPU, and there is none here")
    folder.mkdir(parents=True, exist_ok=True)
    rows = {row["run"]: row for row in read_results(folder)}
    for name in only or module.NAMES:
        for row in module.measure(name, device, rows):
            print(row, flush=True)
            rows[row["run"]] = row
            write_rows(list(rows.values()), folder)
    return table([row for row in rows.values() if _is_of(row, only or module.NAMES)])


def _is_of(row: dict[str, Any], names: Sequence[str]) -> bool:
    return row["run"] in names or row.get("model") in names


def _verify_names(claim: Claim, only: Sequence[str], names: Sequence[str]) -> None:
    for each in only:
        if each not in names:
            otherwise = f"it has {', '.join(names)}"
            raise TrainError(f"{claim.name} has no run {each!r}; {hint(each, names, otherwise)}")


def _verify_meant(claim: Claim, recipe: Recipe, made: Recipe) -> None:
    """Refuse fields in which the claim's runs differ: their names would not be true."""
    for each in asdict(made):
        values = [getattr(run, each) for run in claim.runs]
        if getattr(made, each) != getattr(recipe, each) and any(v != values[0] for v in values):
            raise TrainError(
                f"{claim.name} compares runs of several --{each.replace('_', '-')}; choose among "
                "them by --only, or train another one by `redivider train`"
            )


def choose(claim: Claim, only: Sequence[str], seeds: int, fields: Sequence[str]) -> list[Recipe]:
    """The runs that are wanted, for each seed; the first one's names have no number."""
    _verify_names(claim, only, [each.name for each in claim.runs])
    found = []
    for seed in range(seeds):
        for recipe in claim.runs:
            if only and recipe.name not in only:
                continue
            made = override(recipe, fields) if fields else recipe
            _verify_meant(claim, recipe, made)
            number = made.seed + seed
            name = f"{recipe.name}-seed{number}" if number else recipe.name
            found.append(replace(made, seed=number, name=name))
    return found
