"""The command line. Nothing here imports torch before a command needs it."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from redivider import __version__

if TYPE_CHECKING:
    from redivider.train.recipe import Recipe

RUNS = Path("runs")


class Usage(Exception):
    """Error in how a command was called."""


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors and without abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise `Usage`, instead of printing the usage and exiting."""
        raise Usage(f"{message}; `{self.prog} --help` shows how")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for an error that the user can fix."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _dispatch(words), debug="--debug" in words)


def run_command(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command, print its error in one line, and return its exit status.

    Args:
        command: Returns an exit status.
        debug: Raise the error, for its traceback.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `redivider models | head`
        # Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("redivider: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug or not _is_for_users(error):
            raise
        if getattr(error, "is_first", True):  # only one of several ranks prints it
            print(f"redivider: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    """Parse the command line, and run the subcommand."""
    if words[:1] == ["reproduce"]:
        raise Usage(
            "`redivider reproduce` is now `python experiments/run.py` in a checkout of the "
            "repository; `redivider --help` lists the commands"
        )
    args, rest = _make_parser().parse_known_args(words)
    # For train and compare the rest are fields of the recipe, which `override` parses.
    if rest and args.run not in (train, compare):
        raise Usage(f"unknown argument {rest[0]!r}; `redivider {args.command} --help` shows how")
    name = getattr(args, "recipe", None)
    resumes = getattr(args, "resume", None) is not None  # takes neither a name nor fields
    if rest and name and not resumes and words.index(rest[0]) < words.index(name):
        raise Usage(f"the name comes first: `redivider {args.command} NAME --field value`")
    status: int = args.run(args, rest)
    return status


def _make_parser() -> argparse.ArgumentParser:
    shared = Parser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = Parser(
        prog="redivider", description="Train deep networks without storing their activations."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for run, text in (
        (train, "train a recipe: `redivider train quickstart`"),
        (compare, "train a recipe with several methods, and print a table"),
    ):
        command = commands.add_parser(
            run.__name__,
            help=text,
            parents=[shared],
            add_help=False,
            description=f"{text[0].upper()}{text[1:]}. Fields of the recipe follow it: "
            f"`redivider {run.__name__} NAME --help` lists them.",
        )
        command.add_argument("recipe", nargs="?", help="a name, or recipe.json of a run")
        # Not argparse's own, because `NAME --help` also lists the fields of the recipe.
        command.add_argument("-h", "--help", action="store_true")
        command.add_argument("--out", type=Path, help="folder of the run; default: runs/NAME")
        command.add_argument("--resume", type=Path, metavar="RUN", help="resume a stopped run")
        command.set_defaults(run=run, parser=command)
    command = commands.add_parser("recipes", help="list the recipes", parents=[shared])
    command.set_defaults(run=recipes)
    command = commands.add_parser(
        "models", help="list the models and their costs", parents=[shared]
    )
    command.add_argument("pattern", nargs="*", help='such as "rev_*"; default: all')
    command.set_defaults(run=models)
    command = commands.add_parser("report", help="write a page about runs", parents=[shared])
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    command.add_argument("--out", type=Path, help="the page; default: report.html in the first run")
    command.set_defaults(run=report)
    return parser


def train(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train a recipe, or resume a run."""
    recipe, destination = _prepare(args, rest)
    if recipe.compare:
        return _compare(recipe, destination)
    from redivider.pipeline.runners.process_group import is_last_rank, leave
    from redivider.train.loop import Stopped
    from redivider.train.loop import train as run

    try:
        result = run(recipe, **destination)
    except Stopped as stopped:
        if not is_last_rank():
            return 130
        return _print_how_to_resume(stopped.folder, str(stopped))
    leave()
    if not is_last_rank():
        return 0
    score, folder = result.score, shlex.quote(str(result.folder))
    accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
    print(f"test loss {score.loss:.4f}{accuracy}, {result.seconds:.1f} s of training; {folder}")
    print(f"redivider report {folder}  # a page about it")
    return 0


def compare(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train with several methods, print a table and write a report."""
    from redivider.train.recipe import COMPARED

    if any(word.partition("=")[0] == "--method" for word in rest):
        raise Usage("a comparison is by --compare METHOD ...; `redivider train` takes one --method")
    recipe, destination = _prepare(args, rest)
    if not recipe.compare and destination["resume"]:
        raise Usage(
            f"{destination['folder']} is no comparison; `redivider train --resume` goes on with it"
        )
    return _compare(recipe if recipe.compare else replace(recipe, compare=COMPARED), destination)


def recipes(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print one line per recipe."""
    from redivider.train.recipes import RECIPES

    width = max(map(len, RECIPES))
    for name, make in RECIPES.items():
        recipe = make()
        methods = ", ".join(recipe.compare) if recipe.compare else recipe.method
        text = f"{recipe.model} on {recipe.data} by {methods}, {recipe.epochs:g} epochs"
        samples = f"{recipe.microbatch} x {recipe.accumulate} samples an update"
        print(f"{name:{width}}  {text}, {samples}")
    return 0


def models(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print one row per model that matches a pattern."""
    from redivider.models.options import OptionError
    from redivider.models.summary import print_models

    try:
        print_models(args.pattern or ["*"])
    except OptionError as error:
        raise Usage(str(error)) from None
    return 0


def report(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write a page about runs; the folder of a comparison stands for all its runs."""
    from redivider.train.report import write_report
    from redivider.train.runs import LOG

    runs = []
    for folder in args.runs:
        inside = sorted(path.parent for path in folder.glob(f"*/{LOG}"))
        runs += inside if inside and not (folder / LOG).exists() else [folder]
    out = args.out or args.runs[0] / "report.html"
    write_report(runs, out)
    print(out)
    return 0


class Destination(TypedDict):
    """Folder of a run and how to open it: keyword arguments of `train` and `compare`."""

    folder: Path
    resume: bool
    numbered: bool


def _prepare(args: argparse.Namespace, rest: Sequence[str]) -> "tuple[Recipe, Destination]":
    """Return the recipe of a command, and the destination of its run."""
    from redivider.train.overrides import override
    from redivider.train.recipe import read_recipe
    from redivider.train.recipes import get_recipe
    from redivider.train.runs import RECIPE
    from redivider.train.torchrun import is_restart

    if args.resume is not None:
        if args.recipe or rest or args.out:
            raise Usage("--resume takes the run as it is: no recipe, no fields, no --out")
        destination = Destination(folder=args.resume, resume=True, numbered=False)
        return read_recipe(args.resume / RECIPE), destination
    if args.recipe is None:
        if args.help:
            args.parser.print_help()
            raise SystemExit(0)
        raise Usage("which recipe? `redivider recipes` lists them; quickstart is one")
    if (Path(args.recipe) / RECIPE).exists():
        name = shlex.quote(args.recipe)
        raise Usage(
            f"{name} is a run; `redivider train --resume {name}` goes on with it, and `redivider "
            f"train {name}/{RECIPE}` begins another one like it"
        )
    is_file = args.recipe.endswith(".json")
    recipe = read_recipe(Path(args.recipe)) if is_file else get_recipe(args.recipe)
    recipe = override(recipe, ["--help"] if args.help else rest)
    # torchrun repeats the command when it restarts failed processes; the run then resumes.
    if args.out is not None and (args.out / RECIPE).exists() and not is_restart():
        name = shlex.quote(str(args.out))
        raise Usage(
            f"{name} holds a run already; go on with it by `redivider train --resume {name}`, "
            "or take another folder"
        )
    folder = args.out or RUNS / recipe.name
    return recipe, Destination(folder=folder, resume=False, numbered=args.out is None)


def _compare(recipe: "Recipe", destination: Destination) -> int:
    from redivider.train.compare import REPORT, table
    from redivider.train.compare import compare as run
    from redivider.train.loop import Stopped

    try:
        folder, rows = run(recipe, **destination)
    except Stopped as stopped:
        return _print_how_to_resume(stopped.folder, str(stopped))
    print(f"\n{table(rows)}\n\nopen in a browser: {folder / REPORT}")
    return 0


def _print_how_to_resume(folder: Path, reason: str) -> int:
    command = f"redivider train --resume {shlex.quote(str(folder))}"
    print(f"redivider: {reason}; go on with: {command}", file=sys.stderr)
    return 130


def _is_for_users(error: Exception) -> bool:
    """Return True if the error tells the user what to do, False if it is a bug."""
    from redivider.errors import PipelineError
    from redivider.train.errors import TrainError

    is_to_install = isinstance(error, ImportError) and "pip install" in str(error)
    return is_to_install or isinstance(error, Usage | TrainError | PipelineError | OSError)
