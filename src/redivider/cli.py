"""The command line. Nothing here imports torch before a command needs it."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redivider.train.recipe import Recipe

RUNS = Path("runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 2 where a user can mend it."""
    parser = _make_parser()
    given, rest = parser.parse_known_args(arguments)
    if rest and given.run is not train and given.run is not compare:
        parser.error(f"unknown argument {rest[0]!r}; `redivider {given.command} --help` lists all")
    try:
        status: int = given.run(given, rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `redivider models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("redivider: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if given.debug or not _is_for_users(error):
            raise
        print(f"redivider: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _make_parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="redivider", description="Train deep networks without storing their activations."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for run, text in (
        (train, "train by a recipe: `redivider train quickstart`"),
        (compare, "train a recipe by several methods, and print them in a table"),
    ):
        each = commands.add_parser(
            run.__name__,
            help=text,
            parents=[shared],
            add_help=False,
            description=f"{text[0].upper()}{text[1:]}. Fields of the recipe follow it: "
            f"`redivider {run.__name__} NAME --help` lists them.",
        )
        each.add_argument("recipe", nargs="?", help="a name, or recipe.json of a run")
        each.add_argument("-h", "--help", action="store_true")
        each.add_argument("--out", type=Path, help="folder of the run; runs/NAME unless given")
        each.add_argument("--resume", type=Path, metavar="RUN", help="go on with a stopped run")
        each.set_defaults(run=run, parser=each)
    each = commands.add_parser("recipes", help="list the recipes", parents=[shared])
    each.set_defaults(run=recipes)
    each = commands.add_parser("models", help="list the models and their costs", parents=[shared])
    each.add_argument("pattern", nargs="*", help='such as "rev_*"; all unless given')
    each.set_defaults(run=models)
    each = commands.add_parser("report", help="write a page about runs", parents=[shared])
    each.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    each.add_argument(
        "--out", type=Path, help="the page; report.html in the first run unless given"
    )
    each.set_defaults(run=report)
    return parser


def train(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train by a recipe, or go on with a run."""
    recipe, folder = _prepare(given, rest)
    if recipe.compare:
        return _compare(recipe, folder, resume=given.resume is not None)
    from redivider.train.loop import Stopped
    from redivider.train.loop import train as run

    try:
        result = run(recipe, folder, resume=given.resume is not None)
    except Stopped as stopped:
        return _say_how_to_go_on(folder, str(stopped))
    score = result.score
    accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
    print(f"test loss {score.loss:.4f}{accuracy}, {result.seconds:.1f} s of training; {folder}")
    print(f"redivider report {folder}  # a page about it")
    return 0


def compare(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train by several methods; print a table, and write a report."""
    recipe, folder = _prepare(given, rest)
    if not recipe.compare:
        recipe = replace(recipe, compare=("store", "checkpoint", "reverse", "petra"))
    return _compare(recipe, folder, resume=given.resume is not None)


def recipes(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print a line for each recipe."""
    from redivider.train.recipes import RECIPES

    width = max(map(len, RECIPES))
    for name, make in RECIPES.items():
        each = make()
        methods = ", ".join(each.compare) if each.compare else each.method
        what = f"{each.model} on {each.data} by {methods}, {each.epochs:g} epochs"
        print(f"{name:{width}}  {what}, {each.microbatch} x {each.accumulate} samples an update")
    return 0


def models(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print a row for each model that matches a pattern."""
    from redivider.models.summary import print_models

    return print_models(given.pattern or ["*"])


def report(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write a page about runs."""
    from redivider.train.report import write_report

    out = given.out or given.runs[0] / "report.html"
    write_report(given.runs, out)
    print(out)
    return 0


def _prepare(given: argparse.Namespace, rest: Sequence[str]) -> "tuple[Recipe, Path]":
    """The recipe of a command, and the folder of its run."""
    from redivider.train.errors import TrainError
    from redivider.train.fields import override
    from redivider.train.recipe import read_recipe
    from redivider.train.recipes import get_recipe
    from redivider.train.runs import RECIPE

    if given.resume is not None:
        if given.recipe or rest or given.out:
            raise TrainError("--resume takes the run as it is: no recipe, no fields, no --out")
        return read_recipe(given.resume / RECIPE), given.resume
    if given.recipe is None:
        if given.help:
            given.parser.print_help()
            raise SystemExit(0)
        raise TrainError("which recipe? `redivider recipes` lists them; quickstart is one")
    is_file = given.recipe.endswith(".json")
    recipe = read_recipe(Path(given.recipe)) if is_file else get_recipe(given.recipe)
    recipe = override(recipe, ["--help"] if given.help else rest)
    if given.out is not None and (given.out / RECIPE).exists():
        raise TrainError(
            f"{given.out} holds a run already; go on with it by `redivider train --resume "
            f"{given.out}`, or take another folder"
        )
    return recipe, given.out or _free(RUNS / recipe.name)


def _free(folder: Path) -> Path:
    """This folder, or the first one with a number that is not there."""
    found, number = folder, 2
    while found.exists():
        found, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return found


def _compare(recipe: "Recipe", folder: Path, *, resume: bool) -> int:
    from redivider.train.compare import REPORT, table
    from redivider.train.compare import compare as run
    from redivider.train.loop import Stopped

    try:
        rows = run(recipe, folder, resume=resume)
    except Stopped as stopped:
        return _say_how_to_go_on(folder, str(stopped))
    print(f"\n{table(rows)}\n\n{folder / REPORT}")
    return 0


def _say_how_to_go_on(folder: Path, what: str) -> int:
    again = f"redivider train --resume {shlex.quote(str(folder))}"
    print(f"redivider: {what}; go on with: {again}", file=sys.stderr)
    return 130


def _is_for_users(error: Exception) -> bool:
    """Whether an error says what a user can do, and not that something is broken here."""
    from redivider.train.errors import TrainError

    return isinstance(error, TrainError)
