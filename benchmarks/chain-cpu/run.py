"""A training step of a chain on the CPU: reversing against storing and torch's own checkpoints.

Attention and MLP couplings in turn. Every method runs the same units on the same batch, forward and
backward, no optimizer. The methods take turns within each round, another one first every time, and
a ratio is the median over rounds of the ratio within a round. FLOPs are torch's count, memory what
was measured to be allocated.

    python benchmarks/chain-cpu/run.py
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd


class Attention(nn.Module):
    """Pre-norm self-attention without its skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


def mlp(width: int) -> nn.Module:
    """Pre-norm MLP without its skip."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class TorchCheckpoint(nn.Module):
    """The same units, each coupling under torch.utils.checkpoint."""

    def __init__(self, chain: rd.Chain, *, early_stop: bool) -> None:
        super().__init__()
        self.chain, self.early_stop = chain, early_stop

    def forward(self, x: Tensor) -> Tensor:
        """Run the units."""
        with set_checkpoint_early_stop(self.early_stop):
            for unit in self.chain:
                coupling = isinstance(unit, rd.Coupling)
                x = checkpoint(unit, x, use_reentrant=False) if coupling else unit(x)
        return x


def build(options: argparse.Namespace, backward: str) -> rd.Chain:
    """Make the chain, with the same weights for every method."""
    torch.manual_seed(0)
    makers = (lambda: Attention(options.width, options.width // 64), lambda: mlp(options.width))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(options.couplings)]
    return rd.Chain([rd.Duplicate(), *couplings, rd.Fuse("mean")], backward=backward)


def methods(options: argparse.Namespace) -> dict[str, nn.Module]:
    """Return the models to compare."""
    return {
        "store": build(options, "store"),
        "torch checkpoint, early stop": TorchCheckpoint(build(options, "store"), early_stop=True),
        "torch checkpoint, no early stop": TorchCheckpoint(
            build(options, "store"), early_stop=False
        ),
        "checkpoint": build(options, "checkpoint"),
        "reverse": build(options, "reverse"),
        "reverse, fixed": rd.Chain(build(options, "reverse"), arithmetic="fixed"),
    }


def step(model: nn.Module, x: Tensor) -> None:
    """Run one forward and backward."""
    model.zero_grad()
    model(x).square().mean().backward()


def seconds(run: Callable[[], None]) -> float:
    """Return the seconds of a run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--couplings", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=36)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(options.batch, options.tokens, options.width, requires_grad=True)

    models = methods(options)
    flops, memory = {}, {}
    for name, model in models.items():
        step(model, x)
        with FlopCounterMode(display=False) as counter:
            step(model, x)
        flops[name] = counter.get_total_flops()
        memory[name] = rd.measure_memory(model, x)
    times: dict[str, list[float]] = {name: [] for name in models}
    for first in range(options.rounds):
        names = list(models)
        for place in range(len(names)):
            name = names[(first + place) % len(names)]
            times[name].append(seconds(partial(step, models[name], x)))

    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {vars(options)}"
    )
    print("| method | time of store's | GFLOP | work of store's | held MiB | peak MiB |")
    print("|---|---|---|---|---|---|")
    for name in models:
        ratio = _ratio(times, name, "store")
        work = flops[name] / flops["store"]
        held, peak = memory[name].held / 2**20, memory[name].peak / 2**20
        print(
            f"| {name} | {ratio} | {flops[name] / 1e9:.1f} | {work:.3f} | {held:.0f} | {peak:.0f} |"
        )
    for other in list(models)[1:3]:
        print(f"reverse over {other}: {_ratio(times, 'reverse', other)}")


def _ratio(times: dict[str, list[float]], name: str, base: str) -> str:
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
