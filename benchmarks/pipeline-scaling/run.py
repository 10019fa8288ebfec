"""A pipeline over processes on the CPU: how it scales, what messages cost, and what others reach.

Processes of one thread each, over gloo; methods that are compared take turns in one run.

    python benchmarks/pipeline-scaling/run.py --processes 1 2
    python benchmarks/pipeline-scaling/run.py --processes 1 2 4 8 --only scaling rivals
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from accuracy import accuracy
from delay import delay
from messages import messages
from scaling import scaling
from setting import Setting
from slack import slack
from timeline import timeline
from versus import rivals

PARTS: dict[str, Callable[[Setting, list[int]], list[dict[str, Any]]]] = {
    "scaling": scaling,
    "messages": messages,
    "rivals": rivals,
    "delay": delay,
    "slack": slack,
    "timeline": timeline,
    "accuracy": accuracy,
}


def main() -> None:
    """Measure, and print a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--depth", type=int, default=Setting.depth)
    parser.add_argument("--width", type=int, default=Setting.width)
    parser.add_argument("--batch", type=int, default=Setting.batch)
    parser.add_argument("--rounds", type=int, default=Setting.rounds)
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for a machine without others"
    )
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    options = parser.parse_args()
    sizes = ("depth", "width", "batch", "rounds", "patience")
    setting = Setting(**{name: getattr(options, name) for name in sizes})
    torch.set_num_threads(1)
    about = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"{about}, {setting}")
    results: dict[str, Any] = {"about": about, "setting": vars(setting)}
    for name in options.only:
        results[name] = PARTS[name](setting, options.processes)
        print(f"\n{name}\n\n{table(results[name])}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results))


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows as markdown, without lists, which are only written to the file."""
    shown = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]
    names = list(dict.fromkeys(name for row in shown for name in row))
    lines = [names, ["---"] * len(names)]
    lines += [[_text(row.get(name, "")) for name in names] for row in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 100 else _whole(value)


def _whole(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
