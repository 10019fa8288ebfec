"""The command line. Nothing here imports torch before a command needs it."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from redivider import __version__

if TYPE_CHECKING:
    from redivider.train.recipe import Recipe

RUNS = Path("runs")


class Usage(Exception):
    """A command that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """One whose errors are one line, like all others; `--seed` is not short for `--seeds`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        raise Usage(f"{message}; `{self.prog} --help` shows how")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 2 where a user can mend it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given, rest = _make_parser().parse_known_args(words)
        if rest and given.run not in (train, compare, reproduce):
            raise Usage(
                f"unknown argument {rest[0]!r}; `redivider {given.command} --help` shows how"
            )
        name = getattr(given, "recipe", None) or getattr(given, "claim", None)
        goes_on = getattr(given, "resume", None) is not None  # which takes neither
        if rest and name and not goes_on and words.index(rest[0]) < words.index(name):
            raise Usage(f"the name comes first: `redivider {given.command} NAME --field value`")
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
        if "--debug" in words or not _is_for_users(error):
            raise
        if getattr(error, "is_first", True):  # others have heard of it, and one says it
            print(f"redivider: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _make_parser() -> argparse.ArgumentParser:
    shared = Parser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = Parser(
        prog="redivider", description="Train deep networks without storing their activations."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
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
    text = "do again what shows whether a claim of the papers holds"
    each = commands.add_parser(
        "reproduce",
        help=text,
        parents=[shared],
        description=f"{text[0].upper()}{text[1:]}. Without a name it lists them. What is in the "
        "folder is not done again, so the same command goes on with what was stopped. Fields of "
        "recipes may follow, as `redivider train` has them and these runs have alike: "
        "--epochs 0.02 for a trial.",
    )
    each.add_argument("claim", nargs="?", help="its name")
    each.add_argument("--only", nargs="+", default=[], metavar="RUN", help="some of its runs")
    each.add_argument("--seeds", type=int, default=1, help="train with so many, from 0 on")
    each.add_argument("--out", type=Path, help="folder of its runs; runs/reproduce/NAME if not set")
    each.set_defaults(run=reproduce)
    return parser


def train(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train by a recipe, or go on with a run."""
    recipe, where = _prepare(given, rest)
    if recipe.compare:
        return _compare(recipe, where)
    from redivider.pipeline.runners.process_group import is_last_rank, leave
    from redivider.train.loop import Stopped
    from redivider.train.loop import train as run

    try:
        result = run(recipe, **where)
    except Stopped as stopped:
        if not is_last_rank():
            return 130
        return _say_how_to_go_on(stopped.folder, str(stopped))
    leave()
    if not is_last_rank():
        return 0
    score, folder = result.score, shlex.quote(str(result.folder))
    accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
    print(f"test loss {score.loss:.4f}{accuracy}, {result.seconds:.1f} s of training; {folder}")
    print(f"redivider report {folder}  # a page about it")
    return 0


def compare(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train by several methods; print a table, and write a report."""
    from redivider.train.recipe import COMPARED

    if any(each.partition("=")[0] == "--method" for each in rest):
        raise Usage("a comparison is by --compare METHOD ...; `redivider train` takes one --method")
    recipe, where = _prepare(given, rest)
    if not recipe.compare and where["resume"]:
        raise Usage(
            f"{where['folder']} is no comparison; `redivider train --resume` goes on with it"
        )
    return _compare(recipe if recipe.compare else replace(recipe, compare=COMPARED), where)


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
    from redivider.models.options import OptionError
    from redivider.models.summary import print_models

    try:
        print_models(given.pattern or ["*"])
    except OptionError as error:
        raise Usage(str(error)) from None
    return 0


def report(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write a page about runs; the folder of a comparison stands for all of its runs."""
    from redivider.train.report import write_report
    from redivider.train.runs import LOG

    runs = []
    for each in given.runs:
        inside = sorted(path.parent for path in each.glob(f"*/{LOG}"))
        runs += inside if inside and not (each / LOG).exists() else [each]
    out = given.out or given.runs[0] / "report.html"
    write_report(runs, out)
    print(out)
    return 0


def reproduce(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """List the claims, or do again what shows one, and print a table."""
    from redivider.reproduce.claims import CLAIMS, get_claim

    if given.claim is None:
        if rest or given.only or given.out:
            raise Usage("which claim? `redivider reproduce` lists them")
        for each in CLAIMS:
            how = f"{len(each.runs)} trainings" if each.runs else "measured"
            print(f"{each.name:12}{how:14}{each.says}")
        print("\n`--only RUN ...` takes some of these:")
        for each in CLAIMS:
            if each.runs:
                print(f"{each.name:12}{' '.join(run.name for run in each.runs)}")
        return 0
    claim = get_claim(given.claim)
    if given.seeds < 1:
        raise Usage(f"--seeds must be 1 or more, got {given.seeds}")
    folder = given.out or RUNS / "reproduce" / claim.name
    from redivider.reproduce.command import reproduce as run
    from redivider.reproduce.trainings import RESULTS
    from redivider.train.loop import Stopped

    try:
        print(run(claim, folder, only=given.only, seeds=given.seeds, fields=rest))
    except Stopped as stopped:
        print(f"redivider: {stopped}; go on with the same command", file=sys.stderr)
        return 130
    print(f"\n{shlex.quote(str(folder / RESULTS))}")
    return 0


class Where(TypedDict):
    """Where a run goes, as `train` and `compare` take it."""

    folder: Path
    resume: bool
    numbered: bool


def _prepare(given: argparse.Namespace, rest: Sequence[str]) -> "tuple[Recipe, Where]":
    """The recipe of a command, and where its run goes."""
    from redivider.train.fields import override
    from redivider.train.recipe import read_recipe
    from redivider.train.recipes import get_recipe
    from redivider.train.runs import RECIPE
    from redivider.train.torchrun import is_restart

    if given.resume is not None:
        if given.recipe or rest or given.out:
            raise Usage("--resume takes the run as it is: no recipe, no fields, no --out")
        where = Where(folder=given.resume, resume=True, numbered=False)
        return read_recipe(given.resume / RECIPE), where
    if given.recipe is None:
        if given.help:
            given.parser.print_help()
            raise SystemExit(0)
        raise Usage("which recipe? `redivider recipes` lists them; quickstart is one")
    if (Path(given.recipe) / RECIPE).exists():
        name = shlex.quote(given.recipe)
        raise Usage(
            f"{name} is a run; `redivider train --resume {name}` goes on with it, and `redivider "
            f"train {name}/{RECIPE}` begins another one like it"
        )
    is_file = given.recipe.endswith(".json")
    recipe = read_recipe(Path(given.recipe)) if is_file else get_recipe(given.recipe)
    recipe = override(recipe, ["--help"] if given.help else rest)
    if given.out is not None and (given.out / RECIPE).exists() and not is_restart():
        name = shlex.quote(str(given.out))
        raise Usage(
            f"{name} holds a run already; go on with it by `redivider train --resume {name}`, "
            "or take another folder"
        )
    folder = given.out or RUNS / recipe.name
    return recipe, Where(folder=folder, resume=False, numbered=given.out is None)


def _compare(recipe: "Recipe", where: Where) -> int:
    from redivider.train.compare import REPORT, table
    from redivider.train.compare import compare as run
    from redivider.train.loop import Stopped

    try:
        folder, rows = run(recipe, **where)
    except Stopped as stopped:
        return _say_how_to_go_on(stopped.folder, str(stopped))
    print(f"\n{table(rows)}\n\nopen in a browser: {folder / REPORT}")
    return 0


def _say_how_to_go_on(folder: Path, what: str) -> int:
    again = f"redivider train --resume {shlex.quote(str(folder))}"
    print(f"redivider: {what}; go on with: {again}", file=sys.stderr)
    return 130


def _is_for_users(error: Exception) -> bool:
    """Whether an error says what a user can do, and not that something is broken here."""
    from redivider.errors import PipelineError
    from redivider.train.errors import TrainError

    is_to_install = isinstance(error, ImportError) and "pip install" in str(error)
    return is_to_install or isinstance(error, Usage | TrainError | PipelineError | OSError)
