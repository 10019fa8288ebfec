"""Test the claims of the papers: train or measure again, and print a table.

python experiments/run.py                                  # list the claims
python experiments/run.py methods --only petra-64x2 store-64x2
python experiments/run.py methods --epochs 0.02            # a trial
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from claims import CLAIMS, get_claim

from redivider.cli import Parser, Usage, run_command
from redivider.train.runs import RUNS

PROG = "python experiments/run.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 for an error that the user can fix."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _run(words), debug="--debug" in words)


def _run(words: list[str]) -> int:
    args, fields = _make_parser().parse_known_args(words)
    if args.claim is None:
        if fields or args.only or args.out:
            raise Usage(f"which claim? `{PROG}` lists them")
        return _print_claims()
    if fields and words.index(fields[0]) < words.index(args.claim):
        raise Usage(f"the name comes first: `{PROG} NAME --field value`")
    claim = get_claim(args.claim)
    if args.seeds < 1:
        raise Usage(f"--seeds must be 1 or more, got {args.seeds}")
    folder = args.out or RUNS / "reproduce" / claim.name
    # Only now, because these import torch.
    from reproduce import reproduce
    from trainings import RESULTS

    from redivider.train.loop import Stopped

    try:
        print(reproduce(claim, folder, only=args.only, seeds=args.seeds, fields=fields))
    except Stopped as stopped:
        print(f"redivider: {stopped}; resume with the same command", file=sys.stderr)
        return 130
    print(f"\n{shlex.quote(str(folder if claim.scripts else folder / RESULTS))}")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        description="Train or measure again what a claim of the papers rests on. Without a name, "
        "list the claims. Results in the folder are kept, so the same command resumes a stopped "
        "one. Fields of recipes may follow, as for `redivider train`, unless the runs of the claim "
        "differ in them: --epochs 0.02 for a trial.",
    )
    parser.add_argument("claim", nargs="?", help="its name")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="RUN", help="names of runs, models or scripts"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0 on")
    parser.add_argument("--out", type=Path, help="folder of the runs; default: runs/reproduce/NAME")
    return parser


def _print_claims() -> int:
    for claim in CLAIMS:
        how = f"{len(claim.runs)} trainings" if claim.runs else "measured"
        print(f"{claim.name:12}{how:14}{claim.statement}")
    print("\n`--only RUN ...` takes some of these:")
    for claim in CLAIMS:
        if claim.names:
            print(f"{claim.name:12}{' '.join(claim.names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
