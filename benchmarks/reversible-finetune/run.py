"""Memory and time of training a pretrained network reversibly, beside checkpointing.

    python benchmarks/reversible-finetune/run.py --device cpu --width 128 --context 128 --batch 2
    python benchmarks/reversible-finetune/run.py                   # memory and time on a GPU

GPT-2 of transformers with 12, 24 and 48 layers, weights in bf16. On the CPU they are float32, bytes
are counted, and nothing is timed.
"""

import argparse
import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

import redivider as rd
from redivider.checks.memory import Live

DEPTHS = (12, 24, 48)
METHODS = (
    *("store", "checkpoint", "checkpoint, early stop", "offload"),
    *("1 bit", "2 bits", "3 bits", "8 bits"),
)


class Block(torch.nn.Module):
    """A block as a unit: without the tuple that some versions of transformers return."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output = self.block(x)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first


class Body(torch.nn.Module):
    """The body of a GPT-2."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.transformer

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.body(tokens).last_hidden_state
        return result


class Offloaded(torch.nn.Module):
    """The body of a GPT-2, whose checkpoints wait in host memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.transformer
        self.chain = rd.Chain([Block(block) for block in self.body.h], backward="offload")

    def forward(self, tokens: Tensor) -> Tensor:
        body = self.body
        places = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = body.ln_f(self.chain(body.drop(body.wte(tokens) + body.wpe(places))))
        return result


def make_model(args: argparse.Namespace, depth: int, method: str) -> Any:
    """Return a model that trains by a method, and gives the last hidden states."""
    config = transformers.GPT2Config(
        n_layer=depth,
        n_embd=args.width,
        n_head=args.width // 64,
        n_positions=args.context,
        vocab_size=1024,
    )
    with torch.device(args.device):
        model: Any = transformers.GPT2LMHeadModel(config)
    model.train()
    if args.device == "cuda":
        model.to(torch.bfloat16)
    if method.startswith("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif "bit" in method:
        rd.make_reversible(model, int(method.split()[0]))
    return Offloaded(model) if method == "offload" else Body(model)


def stopping(method: str) -> Any:
    """Return a context in which checkpointing stops early, or does not."""
    is_plain = method == "checkpoint"
    return set_checkpoint_early_stop(False) if is_plain else nullcontext()


def count(args: argparse.Namespace, depth: int, method: str) -> dict[str, float]:
    """Count the bytes that are held between forward and backward, and at the worst moment."""
    model = make_model(args, depth, method)
    tokens = torch.randint(1024, (args.batch, args.context))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)  # gradients of weights are not counted
    with Live() as live, stopping(method):
        hidden = model(tokens)
        held = live.bytes
        hidden.sum().backward()
    return {"held": held, "peak": live.peak}


def measure(args: argparse.Namespace, depth: int, method: str) -> dict[str, float]:
    """Measure bytes held and at the worst moment, and milliseconds of forward and backward."""
    gc.collect()  # else the last model may be released between two counts
    model = make_model(args, depth, method)
    tokens = torch.randint(1024, (args.batch, args.context), device="cuda")
    times = []
    for _ in range(6):
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        with stopping(method):
            hidden = model(tokens)
            held = torch.cuda.memory_allocated() - before
            hidden.sum().backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        del hidden
    peak = torch.cuda.max_memory_allocated() - before
    return {"held": held, "peak": peak, "ms": median(times[1:])}


def main() -> None:
    """Print a table, and write all numbers to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run: Callable[..., dict[str, float]] = count if args.device == "cpu" else measure
    num_values = args.batch * args.context * args.width
    rows = []
    transformers.logging.set_verbosity_error()
    for method in args.methods:
        cells = [run(args, depth, method) for depth in args.depths]
        span = args.depths[-1] - args.depths[0]
        slope = (cells[-1]["held"] - cells[0]["held"]) / span / num_values
        constant = cells[0]["held"] / num_values - slope * args.depths[0]
        rows.append({"method": method, "slope": slope, "constant": constant, "cells": cells})
        shown = "  ".join(
            f"{cell['held'] / 2**20:8.0f} {cell['peak'] / 2**20:8.0f}"
            + (f" {cell['ms']:7.1f} ms" if "ms" in cell else "")
            for cell in cells
        )
        print(f"{method:24}{slope:8.3f}{constant:8.2f}  {shown}", flush=True)
    print("method, bytes a value and layer, constant; MiB held and at the worst moment by depth")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
