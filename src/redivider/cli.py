"""The command line: `redivider models`."""

import argparse
import os
import sys
from collections.abc import Sequence

from redivider.models.catalogue import list_models
from redivider.models.summary import summarise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="redivider", description="Train deep networks without storing their activations."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    models = commands.add_parser("models", help="list the models, and what each of them costs")
    models.add_argument("pattern", nargs="*", help='such as "rev_*"; all unless given')
    models.set_defaults(run=lambda given: print_models(given.pattern or ["*"]))
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `redivider models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def print_models(patterns: Sequence[str]) -> int:
    """Print a row for each model that matches a pattern."""
    names = [name for pattern in patterns for name in list_models(pattern)]
    unmatched = [pattern for pattern in patterns if not list_models(pattern)]
    if unmatched:
        print(f"no model matches {' or '.join(unmatched)}; known are:", file=sys.stderr)
        print("  " + "\n  ".join(list_models()), file=sys.stderr)
        return 1
    print(f"{'':16}{'':>15}{'':>10}   activations of a sample, MiB")
    print(f"{'model':16}{'parameters':>15}{'GFLOPs':>10}{'stored':>12}{'reversed':>12}")
    for name in dict.fromkeys(names):
        row = summarise(name)
        stored, rebuilt = (
            f"{row.kept[way] / 2**20:.1f}" if way in row.kept else "-"
            for way in ("store", "reverse")
        )
        print(
            f"{name:16}{row.parameters:>15,}{row.flops / 1e9:>10.1f}{stored:>12}{rebuilt:>12}",
            flush=True,
        )
    print(
        "\nFLOPs of a forward, two for a multiplication with addition; activations that autograd"
        "\nkeeps until the backward, float32, a batch of 8; images of 224 pixels, full contexts."
    )
    return 0
