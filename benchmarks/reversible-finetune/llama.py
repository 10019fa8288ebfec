"""The largest batch and the longest context of a Llama of 1B size on one GPU, by method.

    python benchmarks/reversible-finetune/llama.py --out llama.jsonl

Llama 3.2 1B of transformers with random weights in bf16, and a head in chunks. Peaks of two small
sizes are extrapolated, and the result is confirmed by two steps. With a long context, full
attention would take minutes. There it stays within blocks of tokens, which takes the same memory,
and the time of full attention is measured in one layer.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import redivider as rd

BLOCK = 8192  # tokens
METHODS = ("store", "checkpoint", "offload", "reversible")
SIZE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
SMALL = {
    **SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def make_step(method: str, device: str, size: dict[str, Any]) -> Callable[[Tensor], None]:
    """Return a function that runs forward and backward of the model on tokens."""
    config = transformers.LlamaConfig(**size, max_position_embeddings=2**20)
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
    head = rd.ChunkedCrossEntropy(model.lm_head)
    body: Any = model.model
    if method == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif method == "offload":
        body = rd.Chain(rd.units_from(model)[:-1], backward="offload")
    elif method == "reversible":
        rd.make_reversible(model)

    def step(tokens: Tensor) -> None:
        hidden = body(tokens[:, :-1])
        loss = head(getattr(hidden, "last_hidden_state", hidden), tokens[:, 1:])
        loss.backward()

    return step


FULL = F.scaled_dot_product_attention


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Attend within blocks of tokens, for a batch of 1."""
    shape = (q.shape[2] // BLOCK, BLOCK, q.shape[3])
    q, k, v = (x[0].reshape(len(x[0]), *shape).transpose(0, 1) for x in (q, k, v))
    return FULL(q, k, v, *args, **keywords).transpose(0, 1).flatten(1, 2)[None]


def time_attention(attend: Callable[..., Tensor], context: int) -> tuple[float, float]:
    """Return the seconds of forward and backward of the attention of one layer."""
    num_heads, num_shared = SIZE["num_attention_heads"], SIZE["num_key_value_heads"]
    width = SIZE["hidden_size"] // num_heads
    q, k, v = (
        torch.randn(1, num, context, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for num in (num_heads, num_shared, num_shared)
    )
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
    marks[0].record()
    y = attend(q, k, v, is_causal=True, enable_gqa=True)
    marks[1].record()
    torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    marks[2].record()
    marks[2].synchronize()
    forward, backward = (a.elapsed_time(b) / 1000 for a, b in pairwise(marks))
    return forward, backward


class Trials:
    """Steps of one method, with their peaks and times."""

    def __init__(self, method: str, args: argparse.Namespace) -> None:
        self._device = args.device
        self._step = make_step(method, args.device, SMALL if args.quick else SIZE)
        self._num_tokens = 256 if args.quick else SIZE["vocab_size"]
        self.limit = 0
        if args.device == "cuda":
            free, _ = torch.cuda.mem_get_info()
            self.limit = int(0.97 * (free + torch.cuda.memory_reserved()))

    def run(self, batch: int, context: int) -> dict[str, float] | None:
        """Run two steps; return their peak and the tokens per second of the second one.

        The first one allocates, above all pinned memory, which takes longer than copies to it.
        None if they do not fit.
        """
        generator = torch.Generator().manual_seed(batch * context)
        tokens = torch.randint(self._num_tokens, (batch, context + 1), generator=generator)
        tokens = tokens.to(self._device)
        if self._device == "cpu":
            self._step(tokens)
            return {"peak": float(batch * context), "tokens/s": 0.0}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        try:
            for _ in range(2):
                began = time.perf_counter()
                self._step(tokens)
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return None
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated()
        return {"peak": peak / 2**20, "tokens/s": batch * context / seconds}


def extrapolate(limit: float, cells: dict[int, dict[str, float]]) -> int:
    """Return the size whose peak is the limit, on the line through the two largest sizes."""
    (a, first), (b, second) = sorted(cells.items())[-2:]
    slope = (second["peak"] - first["peak"]) / (b - a)
    return int(b + (limit - second["peak"]) / slope)


def find_longest(trials: Trials, method: str, context: int) -> dict[str, Any]:
    """Return the longest context up to this one that fits, with its peak and tokens per second."""
    context = context // BLOCK * BLOCK
    F.scaled_dot_product_attention = attend_in_blocks  # type: ignore[assignment]
    at_once = trials.run(1, BLOCK * 8)  # to compare its peak with that of full attention
    while (result := trials.run(1, context)) is None:
        context -= max(1, context // BLOCK // 25) * BLOCK
    F.scaled_dot_product_attention = FULL
    blocks, full = (time_attention(own, context) for own in (attend_in_blocks, FULL))
    num_forwards = 1 if method == "store" else 2
    added = num_forwards * (full[0] - blocks[0]) + full[1] - blocks[1]
    seconds = context / result["tokens/s"] + SIZE["num_hidden_layers"] * added
    row = {"context": context, **result, "tokens/s": context / seconds, "attention": full}
    return {**row, "peak at 65,536 in blocks": at_once["peak"] if at_once else 0.0}


def measure(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the largest batch and the longest context of a method."""
    trials = Trials(method, args)
    limit = trials.limit / 2**20 or 4096.0
    trials.run(1, args.context)  # warm up
    row: dict[str, Any] = {"method": method, "limit": limit}
    if args.batches:
        cells = {batch: trials.run(batch, args.context) for batch in args.batches}
        row["batches"] = fits = {size: cell for size, cell in cells.items() if cell is not None}
        batch = extrapolate(limit, fits)
        while batch and (best := trials.run(batch, args.context)) is None:
            batch -= max(1, batch // 25)
        row["largest"] = {"batch": batch, **(best or {})}
        print(json.dumps(row), flush=True)
    if not args.contexts:
        return row
    cells = {context: trials.run(1, context) for context in args.contexts}
    row["contexts"] = fits = {size: cell for size, cell in cells.items() if cell is not None}
    context = extrapolate(limit, fits) // 1024 * 1024
    if args.device == "cuda":
        row["longest"] = find_longest(trials, method, context)
    print(json.dumps(row), flush=True)
    return row


def write(method: str, args: argparse.Namespace) -> None:
    """Measure a method, and write a line."""
    transformers.logging.set_verbosity_error()
    row = measure(method, args)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure every method in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--contexts", type=int, nargs="*", default=[32768, 65536])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Else free memory between blocks of other sizes decides what fits.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for method in args.methods:
        process = multiprocessing.get_context("spawn").Process(target=write, args=(method, args))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
