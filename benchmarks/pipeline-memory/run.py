"""What every stage of a pipeline holds, by method: measured by the allocator, not by a formula.

    python benchmarks/pipeline-memory/run.py --out results.json    # a GPU, RevNet-50
    python benchmarks/pipeline-memory/run.py --device cpu --model revnet18 --image-size 32 --batch 4

Stages are measured one at a time, as with some methods all of them would not fit on one device.
"held" is between two ticks; "peak" is within a tick and includes messages and workspaces.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from alone import BOTH, VARIANTS, Setting, measure, watch_messages

import redivider as rd
from redivider.pipeline.partition import units_of
from redivider.pipeline.schedule import Schedule

Row = dict[str, Any]

PARTS = ("weights", "optimizer", "kept", "stashed")
# PETRA, table 3, in GB of 10^9 bytes: by its own formula, and where both streams count.
TABLE = {
    "petra": (20.3, 21.4),
    "exact-inverse": (21.2, 22.3),
    "dsp": (43.6, None),
    "delayed": (44.5, None),
    "dsp" + BOTH: (None, 66.6),
    "delayed" + BOTH: (None, 67.5),
}


def measure_variant(setting: Setting, variant: str) -> list[Row]:
    """Return a row for each stage."""
    seen = watch_messages(setting, variant)
    rows = []
    for index, (name, unit) in enumerate(units_of(setting.model).items()):
        kind = "coupling" if isinstance(unit, rd.Coupling) else "junction"
        row = {"method": variant, "stage": index, "unit": name, "kind": kind}
        rows.append(row | measure_cleanly(partial(measure, setting, variant, index, seen)))
    return rows


def measure_cleanly(once: Callable[[], Row]) -> Row:
    """Measure, and repeat if bytes are left: a library may have allocated a workspace for good."""
    try:
        row = once()
        return once() if row["left"] else row
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}


def total(rows: Sequence[Row], variant: str, key: str) -> float | None:
    """Sum over all stages; None if one of them ran out of memory, or was not measured."""
    sizes: list[Any] = [row.get(key) for row in rows if row["method"] == variant]
    return None if not sizes or None in sizes else sum(sizes)


def saving(rows: Sequence[Row], variant: str, against: str) -> str:
    """Return the share of memory that a method saves against another."""
    held, more = (total(rows, method, "held") for method in (variant, against))
    return "-" if held is None or more is None else f"{1 - held / more:.1%}"


def show_methods(rows: Sequence[Row], unit: float, published: dict[str, Any]) -> None:
    """Print all stages together, a row for each method."""
    keys = (*PARTS, "held", "peak")
    print(f"| method | {' | '.join(keys)} | largest peak | saved | saved{BOTH} | Table 3 |")
    print("|---" * (len(keys) + 5) + "|")
    for variant in dict.fromkeys(row["method"] for row in rows):
        cells = [show(total(rows, variant, key), unit) for key in keys]
        peaks = [row["peak"] for row in rows if row["method"] == variant and "peak" in row]
        cells += [show(max(peaks, default=None), unit)]
        cells += [saving(rows, variant, base) for base in ("delayed", "delayed" + BOTH)]
        cells += [" / ".join(str(size) for size in published.get(variant, ()) if size) or "-"]
        print(f"| {variant} | {' | '.join(cells)} |")


def show_stages(rows: Sequence[Row], keys: tuple[str, str], unit: float) -> None:
    """Print two figures of every stage by every method."""
    variants = list(dict.fromkeys(row["method"] for row in rows))
    print(f"| stage | unit | delay | {' | '.join(variants)} |")
    print("|---" * (len(variants) + 3) + "|")
    by_place = {(row["stage"], row["method"]): row for row in rows}
    num_stages = 1 + max(row["stage"] for row in rows)
    for index in range(num_stages):
        stages = [by_place[index, variant] for variant in variants]
        cells = [" / ".join(show(row.get(key), unit) for key in keys) for row in stages]
        kind = "" if stages[0]["kind"] == "coupling" else ", junction"
        place = f"{index} | `{stages[0]['unit']}`{kind} | {Schedule(num_stages).delay(index)}"
        print(f"| {place} | {' | '.join(cells)} |")


def show(number: float | None, unit: float) -> str:
    """Format a number of bytes, or say that there is none."""
    return "out of memory" if number is None else f"{number / unit:,.2f}"


def warn_of(rows: Sequence[Row]) -> None:
    """Print measurements that are not sound."""
    for row in rows:
        where = f"{row['method']}, stage {row['stage']}"
        if row.get("left"):
            print(f"{where}: {row['left']:,} bytes are in use after all was let go")
        if abs(row.get("drift", 0)) > 0.01 * row.get("held", 0):
            print(f"{where}: the last two ticks differ by {row['drift']:,} bytes: not steady")


def describe(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Return the environment and the command of this run."""
    flags = {key.replace("_", "-"): value for key, value in vars(options).items() if key != "out"}
    words = [f"--{key} {value}" for key, value in flags.items() if not isinstance(value, list)]
    words += ["--methods", *(f'"{name}"' if " " in name else name for name in options.methods)]
    on_gpu = setting.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(setting.device) if on_gpu else platform.machine(),
        "measured by": "the CUDA allocator" if on_gpu else "storages alive",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python benchmarks/pipeline-memory/run.py", *words]),
        "stages": len(setting.model),
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="revnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bf16"], help="autocast")
    parser.add_argument("--methods", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = rd.create_model(
        args.model,
        num_classes=args.num_classes,
        image_size=args.image_size,
        device=args.device,
    )
    setting = Setting(model, args.image_size, args.num_classes, args.batch, args.dtype == "bf16")
    is_theirs = (args.model, args.image_size, args.batch) == ("revnet50", 224, 64)
    published = TABLE if is_theirs else {}
    environment = describe(setting, args)
    print(*(f"{key}: {value}" for key, value in environment.items()), sep="\n")
    rows: list[Row] = []
    for variant in args.methods:
        start = time.perf_counter()
        rows += measure_variant(setting, variant)
        print(f"{variant}: {time.perf_counter() - start:.1f} s", flush=True)
        if args.out:
            results = {"environment": environment, "published": published, "rows": rows}
            args.out.write_text(json.dumps(results, indent=1))
    largest = max(row.get("peak", 0) for row in rows)
    unit, name = (1e9, "GB of 10^9 bytes") if largest > 1e9 else (1e6, "MB of 10^6 bytes")
    print(f"\nAll stages, {name}\n")
    show_methods(rows, unit, published)
    print("\nEach stage, held / peak\n")
    show_stages(rows, ("held", "peak"), unit)
    print("\nMessages that a stage sends, up / down, MB of 10^6 bytes\n")
    show_stages(rows, ("up", "down"), 1e6)
    warn_of(rows)


if __name__ == "__main__":
    main()
