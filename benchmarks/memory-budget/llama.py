"""A Llama of 1B size at a long context: plans against checkpointing of every layer, at one peak.

    python benchmarks/memory-budget/llama.py > llama.jsonl
    python benchmarks/memory-budget/llama.py --quick --device cpu

Llama 3.2 1B of transformers with random weights in bf16, batch 1, and a head in chunks. The peak of
transformers' gradient checkpointing is the budget of the plans. Peaks are without the gradients of
weights. The last line has the ratios of times, checkpointing's over a plan's.
"""

import argparse
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import redivider as rd
from redivider.budget.meter import counting

MIB = 2**20
NUM_STEPS = 5
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
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


class Loss(nn.Module):
    """Loss of the features of a batch, which may be part of an output of transformers."""

    def __init__(self, head: nn.Linear, targets: Tensor) -> None:
        super().__init__()
        self.entropy = rd.ChunkedCrossEntropy(head)
        self.targets = targets

    def forward(self, features: Any) -> Tensor:
        features = getattr(features, "last_hidden_state", features)
        loss: Tensor = self.entropy(features, self.targets)
        return loss


def make(method: str, args: argparse.Namespace) -> tuple[nn.Module, Loss, Tensor]:
    """Return the body of the model, its loss, and tokens."""
    size: dict[str, Any] = SMALL if args.quick else SIZE
    config = transformers.LlamaConfig(**size, max_position_embeddings=2**20)
    torch.manual_seed(0)
    with torch.device(args.device):
        model: Any = transformers.LlamaForCausalLM(config)
        tokens = torch.randint(config.vocab_size, (1, args.context + 1))
    model.to(torch.bfloat16 if args.device == "cuda" else torch.float32).train()
    loss = Loss(model.lm_head, tokens[:, 1:])
    body: nn.Module = model.model
    if method == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif method == "chain":
        body = rd.Chain(rd.units_from(model)[:-1], backward="checkpoint")
    else:
        rd.make_reversible(model)
    return body, loss, tokens[:, :-1]


def measure(run: Callable[[], Tensor], weights: list[Tensor], device: str) -> dict[str, float]:
    """Return the median seconds of steps, and the peak in bytes."""
    times = []
    for _ in range(1 + NUM_STEPS):
        _synchronize(device)
        start = time.perf_counter()
        torch.autograd.grad(run(), weights, allow_unused=True)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    with counting(torch.device(device) if device == "cuda" else None, weights) as meter:
        grads = torch.autograd.grad(run(), weights, allow_unused=True)
        peak = meter.peak_without(grads)
    return {"seconds": median(times[1:]), "peak": peak}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_method(method: str, args: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Print and return the time and the peak of a method."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    body, loss, tokens = make(method, args)
    row: dict[str, Any] = {"method": method, "context": args.context}
    if method != "checkpoint":
        start = time.perf_counter()
        try:
            plan = rd.plan(body, tokens, memory=budget, loss=loss)
        except ValueError as error:
            print(json.dumps(row | {"error": str(error)}), flush=True)
            return {}
        plan.apply()
        row |= {"planning": time.perf_counter() - start, "predicted": plan.predicted / MIB}
        row |= {"choices": dict(Counter(plan)), "plan": ",".join(plan), "note": plan.note}
    weights: list[Tensor] = list({*body.parameters(), *loss.parameters()})
    row |= measure(lambda: loss(body(tokens)), weights, args.device)
    print(json.dumps(row | {"peak": row["peak"] / MIB}), flush=True)
    return row


def main() -> None:
    """Measure checkpointing, then plans at its peak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--context", type=int)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.context = args.context or (512 if args.quick else 32768)
    # Else free memory between blocks of other sizes decides what fits.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    transformers.logging.set_verbosity_error()
    reference = run_method("checkpoint", args, 0)
    rows = {name: run_method(name, args, reference["peak"]) for name in ("chain", "reversible")}
    ratios = {n: reference["seconds"] / row["seconds"] for n, row in rows.items() if row}
    print(json.dumps({"ratios": ratios}))


if __name__ == "__main__":
    main()
