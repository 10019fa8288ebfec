"""Training steps of reversible networks on a GPU: time, work and memory of every backward.

    python benchmarks/chain-throughput/run.py --out results.json
    python benchmarks/chain-throughput/run.py --only S/16 S48/32 --hows captured+compiled
    python benchmarks/chain-throughput/run.py --peer-path ../minREV  # a clone of karttikeya/minREV

A step is forward and backward, without the optimizer, bf16 weights under autocast, streams in
float32. All methods of one setting take turns, so that ratios are of one time.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import Run, peer_steps
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd

# Appended, so that modules of this folder are found first.
sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from steps import Step, free_memory, take_workspaces

# name: model, options, batch
SETTINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "S/16": ("rev_vit_small", {}, 16),
    "S48/32": ("rev_vit_small", {"depth": 48}, 32),
    "S/64": ("rev_vit_small", {}, 64),
    "B/64": ("rev_vit_base", {}, 64),
    "B/256": ("rev_vit_base", {}, 256),
    "L/64": ("rev_vit_large", {}, 64),
    "RevNet-50/64": ("revnet50", {}, 64),
    "GPT-small/8": ("rev_gpt_small", {}, 8),
    "Swin-T/8": ("rev_swin_tiny", {}, 8),
    "Swin-T/64": ("rev_swin_tiny", {}, 64),
    "Swin-S/8": ("rev_swin_small", {}, 8),
    "Swin-S/64": ("rev_swin_small", {}, 64),
    "Swin-B/8": ("rev_swin_base", {}, 8),
    "Swin-B/64": ("rev_swin_base", {}, 64),
    "MViT-B/16": ("rev_mvit_base", {}, 16),
    "MViT-B/64": ("rev_mvit_base", {}, 64),
    "RoBERTa-B/8": ("rev_roberta_base", {}, 8),
    "RoBERTa-B/64": ("rev_roberta_base", {}, 64),
}
METHODS = (
    "store",
    "torch checkpoint",
    "checkpoint",
    "reverse",
    "overlap",
    "checkpoint-overlap",
    "auto",
)
HOWS = ("eager", "compiled", "captured", "captured+compiled")
MIB = 2**20


class Checkpointed(torch.nn.Module):
    """The same units under torch's own checkpointing, a block at a time."""

    def __init__(self, chain: rd.Chain, per_block: int, compiled: bool) -> None:
        super().__init__()
        self.chain, self.per_block = chain, per_block
        self.add = torch.compile(torch.add, dynamic=False) if compiled else torch.add

    def forward(self, x: Any) -> Any:
        """Run junctions as they are, and couplings in blocks."""
        for in_row, units in self.chain.segments():
            modules = [unit for _, unit in units]
            if not in_row:
                for unit in modules:
                    x = unit(x)
                continue
            x = (x[0].float(), x[1].float())
            for start in range(0, len(modules), self.per_block):
                block = modules[start : start + self.per_block]
                x = checkpoint(
                    _run_block, self.add, block, *x, use_reentrant=False, preserve_rng_state=False
                )
        return x


def _run_block(add: Any, block: list[rd.Coupling], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    for coupling in block:
        a, b = add(b, coupling.f(a)), a
    return a, b


def make_step(setting: str, method: str, compiled: bool) -> Step:
    """Return forward and backward of a setting with a method."""
    name, options, batch = SETTINGS[setting]
    step = Step(name, batch, torch.device("cuda"), compiled=compiled, **options)
    if method == "torch checkpoint":
        step.body = Checkpointed(step.body, 1 if "net" in name else 2, compiled)
    else:
        step.body.backward = method
    return step


def measure(
    setting: str, compiled: bool, hows: list[str], methods: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Time all methods in turn, called and then captured; return a row for each."""
    rows: list[dict[str, Any]] = []
    runs: dict[str, dict[str, Run]] = {how: {} for how in hows if ("compiled" in how) == compiled}
    for method in methods:
        step = make_step(setting, method, compiled)
        for how, prepared in runs.items():
            row, prepared[method] = _prepare(step, how, method)
            rows.append({"setting": setting, "how": how, "method": method, **row})
    times = {how: take_turns(prepared, rounds) for how, prepared in runs.items()}
    for row in rows:
        ordered = sorted(times[row["how"]][row["method"]])
        row["ms"] = median(ordered)
        row["quartiles"] = [ordered[rounds // 4], ordered[3 * rounds // 4]]
    return rows


def _prepare(step: Step, how: str, method: str) -> tuple[dict[str, Any], Run]:
    """Warm up or capture; return the figures of memory and work, and the function to time."""
    row: dict[str, Any] = {}
    _let_go(step)
    if "captured" in how:
        reserved = torch.cuda.memory_reserved()
        run = step.captured()
        torch.cuda.empty_cache()
        row["reserved"] = torch.cuda.memory_reserved() - reserved
        return row, run
    for _ in range(10 if method == "auto" else 3):
        step.run()
        torch.cuda.synchronize()
    _let_go(step)
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    row["allocated"] = torch.cuda.max_memory_allocated() - base
    if how == "eager":
        with FlopCounterMode(display=False) as counter:
            step.run()
        row["gflop"] = counter.get_total_flops() / 1e9
    return row, step.run


def _let_go(step: Step) -> None:
    step.chain.zero_grad()
    free_memory()


def measure_depths(methods: list[str]) -> list[dict[str, Any]]:
    """Return the peak memory of an eager step of S/16 by depth, without gradients."""
    rows = []
    for depth in (12, 24, 48, 96):
        SETTINGS[f"S{depth}/16"] = ("rev_vit_small", {"depth": depth}, 16)
        for method in methods:
            step = make_step(f"S{depth}/16", method, compiled=False)
            row, _ = _prepare(step, "compiled", method)  # nothing to count
            weights = sum(param.nbytes for param in step.chain.parameters())
            row["activations"] = row["allocated"] - weights
            rows.append({"setting": f"S{depth}/16", "how": "depth", "method": method, **row})
    return rows


def take_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Time a few steps of each method at a time, in rounds; return milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            run()
            start.record()
            for _ in range(3):
                run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 3)
    return times


def show(rows: list[dict[str, Any]]) -> None:
    """Print a row for each method."""
    for row in rows:
        kind = next((key for key in ("reserved", "activations", "allocated") if key in row), "")
        memory = row.get(kind, 0) / MIB
        print(
            f"| {row['setting']} | {row['how']} | {row['method']} | {row.get('ms', 0):.2f} "
            f"| {memory:,.0f} {kind} | {row.get('gflop', 0):,.0f} |",
            flush=True,
        )


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    parser.add_argument("--hows", nargs="*", default=list(HOWS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--depths", action="store_true", help="memory at 12 to 96 layers, too")
    parser.add_argument("--peers", nargs="*", default=["S/16", "B/64"], help="settings with peers")
    parser.add_argument("--peer-path", help="a clone of minREV; others are used if installed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.rounds} rounds")
    take_workspaces(torch.device("cuda"))
    results: list[dict[str, Any]] = []

    def keep(rows: list[dict[str, Any]]) -> None:
        show(rows)
        results.extend(rows)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))

    if args.depths:
        keep(measure_depths([method for method in args.methods if method != "auto"]))
    for setting in args.only:
        for compiled in (False, True):
            keep(measure(setting, compiled, args.hows, args.methods, args.rounds))
        model, options, batch = SETTINGS[setting]
        if "vit" in model and setting in args.peers:
            times = take_turns(peer_steps(model, options, batch, args.peer_path), args.rounds)
            rows = [
                {"setting": setting, "how": "eager", "method": name, "ms": median(milliseconds)}
                for name, milliseconds in times.items()
            ]
            keep(rows)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
