"""The command line. Nothing here imports torch before a command needs it."""

import argparse
import fnmatch
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from redivider import __version__
from redivider.errors import did_you_mean, no_such

if TYPE_CHECKING:
    from redivider.train.recipe import Recipe
    from redivider.train.task import Score


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
    command = words[0] if words else ""
    if command and not command.startswith("-") and command not in COMMANDS:
        raise Usage(no_such("command", command, COMMANDS, "`redivider --help` lists all"))
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
    shared.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    on_device = Parser(add_help=False)
    on_device.add_argument(
        "--device", default="auto", help="Device; auto is a GPU if there is one, else the CPU."
    )
    parser = Parser(
        prog="redivider", description="Train deep networks without storing their activations."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(run: Callable[..., int], text: str, *parents: Parser, **options: Any) -> Parser:
        command: Parser = commands.add_parser(
            _name(run),
            help=text,
            parents=[shared, *parents],
            **{"description": text, **options},
        )
        command.set_defaults(run=run, parser=command)
        return command

    for run, text in (
        (train, "Train a recipe, such as quickstart."),
        (compare, "Train a recipe with several methods, and print a table."),
    ):
        fields = (
            f"{text} Fields of the recipe follow its name; `redivider {run.__name__} NAME --help` "
            "lists them."
        )
        command = add(run, text, add_help=False, description=fields)
        command.add_argument("recipe", nargs="?", help="Name of a recipe, or recipe.json of a run.")
        # Not argparse's own, because `NAME --help` also lists the fields of the recipe.
        command.add_argument(
            "-h", "--help", action="store_true", help="Show this, and the fields of a recipe."
        )
        command.add_argument("--out", type=Path, help="Folder of the run; runs/NAME by default.")
        command.add_argument(
            "--resume", type=Path, metavar="RUN", help="Resume a stopped run in its folder."
        )
    command = add(evaluate, "Score the trained models of runs on their test data.", on_device)
    _add_runs(command, "+")
    command = add(sample, "Continue a text with the trained language model of a run.", on_device)
    _add_runs(command)
    command.add_argument("--prompt", default="\n", help="Text to continue; a new line by default.")
    command.add_argument("--tokens", type=int, default=256, help="Number of tokens to add.")
    command.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="Divisor of the logits; 0 always takes the likeliest token.",
    )
    command.add_argument("--seed", type=int, default=0, help="Seed of the random choices.")
    command = add(export, "Export the trained model of a run, for batches of any size.")
    _add_runs(command)
    command.add_argument(
        "--format",
        choices=("torch", "onnx"),
        default="torch",
        help="A program of torch.export (the default), or ONNX.",
    )
    command.add_argument("--out", type=Path, help="File; model.pt2 or model.onnx in the run.")
    command = add(recipes, "List the recipes.")
    command.add_argument("pattern", nargs="*", help='Names such as "revnet18*"; all by default.')
    command = add(models, "List the models and their costs.")
    command.add_argument("pattern", nargs="*", help='Names such as "rev_*"; all by default.')
    command = add(plan_pipeline, "Choose a pipeline for devices that are not here.")
    command.add_argument("model", help="Name of a model; `redivider models` lists them.")
    for name, kind, default, text in (
        ("devices", int, None, "Number of devices."),
        ("samples", int, None, "Samples of an update."),
        ("memory", str, "80GiB", 'Memory of a device, such as "24GiB" (80GiB).'),
        ("link-ms", float, 0.01, "Milliseconds of a message between devices (0.01)."),
        ("bandwidth", float, 50.0, "GB per second of a link (50)."),
        ("tflops", float, 100.0, "TFLOPs per second that a device reaches (100)."),
        ("overhead-us", float, 20.0, "Microseconds of a unit beside its computation (20)."),
        ("max-late", float, 1.0, "Updates by which a gradient may be late (1)."),
    ):
        command.add_argument(
            f"--{name}", type=kind, default=default, required=default is None, help=text
        )
    command.add_argument("--nodes", type=int, default=1, help="Machines of these devices (1).")
    command.add_argument("--image-size", type=int, help="Pixels of an image; 224 by default.")
    command.add_argument("--picture", type=Path, help="File for the timeline, such as plan.svg.")
    command = add(report, "Write a page about runs.")
    _add_runs(command, "+")
    command.add_argument("--out", type=Path, help="File; report.html in the first folder.")
    return parser


def _add_runs(command: Parser, number: str | None = None) -> None:
    text = "Folder of a run" if number is None else "Folder of a run, or of several runs"
    command.add_argument("runs", nargs=number, type=Path, metavar="RUN", help=f"{text}.")


def train(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train a recipe, or resume a run."""
    recipe, destination = _prepare(args, rest)
    if recipe.compare:
        return _compare(recipe, destination)
    from redivider.pipeline.runners.process_group import leave
    from redivider.pipeline.runners.torchrun import is_last_rank
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
    folder = shlex.quote(str(result.folder))
    print(f"{_format_score(result.score)}, {result.seconds:.1f} s of training; {folder}")
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
            f"{destination['folder']} is no comparison; `redivider train --resume` resumes it"
        )
    return _compare(recipe if recipe.compare else replace(recipe, compare=COMPARED), destination)


def evaluate(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the scores of runs."""
    from redivider.train.model import evaluate_run
    from redivider.train.runs import find_runs

    for folder in [run for place in args.runs for run in find_runs(place)]:
        score = evaluate_run(folder, device=args.device)
        print(f"{folder}: {_format_score(score)}", flush=True)
    return 0


def sample(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print a text and its continuation."""
    from redivider.train.model import sample_text

    text = sample_text(
        args.runs,
        args.prompt,
        num_tokens=args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        device=args.device,
    )
    print(text)
    return 0


def export(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Export a model, and print the file."""
    from redivider.train.model import export_run

    print(export_run(args.runs, args.out, format=args.format))
    return 0


def recipes(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print one line per recipe that matches a pattern."""
    from redivider.train.recipes import RECIPES

    names = _match("recipe", args.pattern, list(RECIPES))
    width = max(map(len, names))
    for name in names:
        recipe = RECIPES[name]()
        methods = ", ".join(recipe.compare) if recipe.compare else recipe.method
        text = f"{recipe.model} on {recipe.data} by {methods}, {recipe.epochs:g} epochs"
        samples = f"{recipe.microbatch} x {recipe.accumulate} samples an update"
        print(f"{name:{width}}  {text}, {samples}")
    return 0


def models(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print one row per model that matches a pattern."""
    from redivider.models.catalogue import list_models
    from redivider.models.summary import print_models

    print_models(_match("model", args.pattern, list_models()))
    return 0


def report(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write a page about runs."""
    from redivider.train.report import write_report
    from redivider.train.runs import find_runs

    out = args.out or args.runs[0] / "report.html"
    write_report([run for folder in args.runs for run in find_runs(folder)], out)
    print(out)
    return 0


def plan_pipeline(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print a plan of a pipeline: a table, a picture and a command."""
    from redivider.checks.size import parse_bytes
    from redivider.pipeline.diagnostics.timeline import verify_picture
    from redivider.pipeline.planner import Cluster
    from redivider.train.pipeline_plan import plan_pipeline as plan

    try:
        memory = parse_bytes(args.memory)
    except ValueError as error:
        raise Usage(f"--memory: {error}") from None
    for name in ("devices", "nodes", "samples", "bandwidth", "tflops"):
        if not 0 < getattr(args, name.replace("-", "_")) < inf:
            raise Usage(f"--{name} must be above 0, and finite")
    for name in ("link-ms", "overhead-us", "max-late"):
        if not 0 <= getattr(args, name.replace("-", "_")) < inf:
            raise Usage(f"--{name} must be at least 0, and finite")
    if args.devices % args.nodes:
        raise Usage(f"--devices {args.devices} is no multiple of --nodes {args.nodes}")
    if args.picture is not None:
        try:
            verify_picture(args.picture)
        except ValueError as error:
            raise Usage(f"--picture: {error}") from None
    cluster = Cluster(
        devices=args.devices,
        memory=memory,
        delay=args.link_ms / 1e3,
        bandwidth=args.bandwidth * 1e9,
        overhead=args.overhead_us / 1e6,
    )
    chosen = plan(
        args.model,
        cluster,
        samples=args.samples,
        max_late=args.max_late,
        flops=args.tflops * 1e12,
        nodes=args.nodes,
        **({} if args.image_size is None else {"image_size": args.image_size}),
    )
    print(chosen)
    if args.picture is not None:
        chosen.chosen.simulation.timeline().plot(args.picture)
    return 0


def _name(run: Callable[..., int]) -> str:
    """Return the name of a command on the command line."""
    return run.__name__.replace("_", "-")


COMMANDS = {
    _name(run): run
    for run in (train, compare, evaluate, sample, export, recipes, models, plan_pipeline, report)
}


def _match(kind: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match any of the patterns, or begin with it; without patterns, all."""
    chosen: list[str] = []
    for pattern in patterns or ["*"]:
        matches = fnmatch.filter(names, pattern) or fnmatch.filter(names, f"{pattern}*")
        if not matches:
            hint = did_you_mean(pattern.strip("*"), names, f"there are {', '.join(names)}")
            raise Usage(f"no {kind} matches {pattern}; {hint}")
        chosen += matches
    return list(dict.fromkeys(chosen))


def _format_score(score: "Score") -> str:
    accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
    return f"test loss {score.loss:.4f}{accuracy}"


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
    from redivider.train.runs import RECIPE, RUNS, no_run
    from redivider.train.torchrun import is_restart

    if args.resume is not None:
        if args.recipe or rest or args.out:
            raise Usage("--resume takes the run as it is: no recipe, no fields, no --out")
        if not (args.resume / RECIPE).exists():
            raise no_run(args.resume)
        destination = Destination(folder=args.resume, resume=True, numbered=False)
        return read_recipe(args.resume / RECIPE), destination
    if args.help:
        args.parser.print_help()
    if args.recipe is None:
        if args.help:
            raise SystemExit(0)
        raise Usage("which recipe? `redivider recipes` lists them; quickstart is one")
    if (Path(args.recipe) / RECIPE).exists():
        name = shlex.quote(args.recipe)
        raise Usage(
            f"{name} is a run; `redivider train --resume {name}` resumes it, and `redivider train "
            f"{name}/{RECIPE}` starts another run of its recipe"
        )
    is_file = args.recipe.endswith(".json")
    recipe = read_recipe(Path(args.recipe)) if is_file else get_recipe(args.recipe)
    recipe = override(recipe, ["--help"] if args.help else rest)
    # torchrun repeats the command when it restarts failed processes; the run then resumes.
    if args.out is not None and (args.out / RECIPE).exists() and not is_restart():
        name = shlex.quote(str(args.out))
        raise Usage(
            f"{name} already holds a run; `redivider train --resume {name}` resumes it; or choose "
            "another folder"
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
    print(f"redivider: {reason}; resume it by: {command}", file=sys.stderr)
    return 130


def _is_for_users(error: Exception) -> bool:
    """Return True if the error tells the user what to do, False if it is a bug."""
    from redivider.errors import PipelineError
    from redivider.train.errors import TrainError

    is_to_install = isinstance(error, ImportError) and "pip install" in str(error)
    return is_to_install or isinstance(error, Usage | TrainError | PipelineError | OSError)
