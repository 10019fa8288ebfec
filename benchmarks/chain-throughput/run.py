"""Training steps of reversible networks on a GPU: time, work and memory of every backward.

    python benchmarks/chain-throughput/run.py --out results.json
    python benchmarks/chain-throughput/run.py --only S/16 S48/32 --hows captured+compiled
    python benchmarks/chain-throughput/run.py --peer-path ../minREV  # a clone of karttikeya/minREV

A step is forward and backward, without the optimizer, bf16 weights under autocast, streams in
float32. All methods of one setting take turns, so that ratios are of one time.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd
from redivider.models.catalogue import resolve

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
Step = Callable[[], Tensor]


class Checkpointed(torch.nn.Module):
    """The same units under torch's own checkpointing, a block at a time: the rival."""

    def __init__(self, chain: rd.Chain, per_block: int, compiled: bool) -> None:
        super().__init__()
        self.chain, self.per_block = chain, per_block
        self.add = torch.compile(torch.add) if compiled else torch.add

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


def make_loss(model: str, batch: int, options: dict[str, Any]) -> Callable[[Any], Tensor]:
    """A loss of the network's output; language models have theirs in chunks."""
    x = resolve(model, **options)[1].example(batch).cuda()
    if x.is_floating_point():
        target = torch.randint(1000, (batch,), device="cuda")
        return lambda net: F.cross_entropy(net(x).float(), target)
    return lambda net: net.loss(net(x), x)


class Network:
    """A model, how it is run, and what its loss needs."""

    def __init__(self, setting: str, method: str, compiled: bool) -> None:
        name, options, batch = SETTINGS[setting]
        backward = "store" if method == "torch checkpoint" else method
        chain = rd.create_model(
            name, device="cuda", dtype=torch.bfloat16, backward=backward, **options
        )
        chain.check_every = 0
        self.parameters = list(chain.parameters())
        if compiled:
            chain.compile()
        if "gpt" in name:
            self.loss = rd.ChunkedCrossEntropy(chain[-1], chunk=2048)
            chain = chain[:-1]
        self.run: Any = chain
        if method == "torch checkpoint":
            self.run = Checkpointed(chain, 1 if "net" in name else 2, compiled)
        self._make_loss = make_loss(name, batch, options)

    def __call__(self, x: Any) -> Any:
        return self.run(x)

    def step(self) -> Tensor:
        """Forward and backward."""
        for each in self.parameters:
            each.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            loss = self._make_loss(self)
        loss.backward()
        return loss


def peer_step(path: str, setting: str, fast: bool) -> Step:
    """A step of minREV's own code on its own model, fp16 autocast inside, as it is written."""
    sys.path.insert(0, path)
    from fast_rev import FastRevViT  # type: ignore[import-not-found]
    from rev import RevViT  # type: ignore[import-not-found]

    name, options, batch = SETTINGS[setting]
    made = resolve(name, **options)[1]
    kind = FastRevViT if fast else RevViT
    model = kind(
        embed_dim=made.width,
        n_head=made.heads,
        depth=made.depth,
        patch_size=(16, 16),
        image_size=(224, 224),
        num_classes=1000,
        enable_amp=True,
    ).cuda()
    x = torch.randn(batch, 3, 224, 224, device="cuda")
    target = torch.randint(1000, (batch,), device="cuda")

    def step() -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        return loss

    return step


def measure(setting: str, how: str, methods: list[str], rounds: int) -> list[dict[str, Any]]:
    """Time all methods in turn; return a row for each."""
    rows, steps = [], {}
    for method in methods:
        gc.collect()
        torch.cuda.empty_cache()
        begun = time.perf_counter()
        network = Network(setting, method, "compiled" in how)
        for _ in range(10 if method == "auto" and "captured" not in how else 3):
            network.step()
            torch.cuda.synchronize()
        row: dict[str, Any] = {"setting": setting, "how": how, "method": method}
        base = torch.cuda.memory_allocated() - sum(p.nbytes for p in network.parameters)
        torch.cuda.reset_peak_memory_stats()
        network.step()
        row["allocated"] = torch.cuda.max_memory_allocated() - base
        if how == "eager":
            with FlopCounterMode(display=False) as counter:
                network.step()
            row["gflop"] = counter.get_total_flops() / 1e9
        if "captured" in how:
            for each in network.parameters:
                each.grad = None
            gc.collect()
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
            captured = rd.capture(
                lambda _, network=network: network.step(), torch.zeros((), device="cuda")
            )
            torch.cuda.empty_cache()
            row["reserved"] = torch.cuda.memory_reserved() - reserved
            steps[method] = captured._graph.replay
        else:
            steps[method] = network.step
        row["prepared_s"] = time.perf_counter() - begun
        row["network"] = network  # alive until all are timed
        rows.append(row)
    times = take_turns(steps, rounds)
    for row in rows:
        del row["network"]
        row["ms"] = median(times[row["method"]])
        ordered = sorted(times[row["method"]])
        row["quartiles"] = [ordered[rounds // 4], ordered[3 * rounds // 4]]
    return rows


def take_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, a few at a time, in rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            step()
            start.record()
            for _ in range(3):
                step()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 3)
    return times


def show(rows: list[dict[str, Any]]) -> None:
    """Print a row for each method."""
    for row in rows:
        memory = row.get("reserved", row.get("allocated", 0)) / MIB
        kind = "reserved" if "reserved" in row else "allocated"
        print(
            f"| {row['setting']} | {row['how']} | {row['method']} | {row['ms']:.2f} "
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
    parser.add_argument("--peer-path")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.rounds} rounds")
    found: list[dict[str, Any]] = []
    for setting in given.only:
        for how in given.hows:
            rows = measure(setting, how, given.methods, given.rounds)
            show(rows)
            found += rows
            if given.out:
                given.out.write_text(json.dumps(found, indent=1))
        if given.peer_path and setting in ("S/16", "B/64"):
            peers = {
                f"minREV {'PaReprop' if fast else 'reversible'}": fast for fast in (False, True)
            }
            steps = {
                name: peer_step(given.peer_path, setting, fast) for name, fast in peers.items()
            }
            times = take_turns(steps, given.rounds)
            rows = [
                {"setting": setting, "how": "eager", "method": name, "ms": median(each)}
                for name, each in times.items()
            ]
            show(rows)
            found += rows
        torch._dynamo.reset()
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
