"""Gradient quality by stage on digits: plain, with look-ahead, and with rates by delay; on the CPU.

python benchmarks/gradient-quality/run.py --picture quality.svg
"""

import argparse
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import redivider as rd
from redivider.pipeline.diagnostics.probe import Probe

WIDTH, STAGES, BATCH, TICKS = 64, 10, 16, 600
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "look-ahead": {"lookahead": True},
    "rates by delay": {"lr_by_delay": True},
}


def make_model(seed: int) -> rd.Chain:
    """Return a stem, eight couplings, a fusion and a head, for ten stages."""
    torch.manual_seed(seed)
    fs = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        for _ in range(8)
    ]
    stem = nn.Sequential(nn.Linear(64, WIDTH), rd.Duplicate())
    head = nn.Sequential(rd.Fuse(), nn.Linear(2 * WIDTH, 10))
    return rd.Chain([stem, *map(rd.Coupling, fs), head])


def train(
    seed: int, options: dict[str, Any], accumulate: int, rate: float, every: int
) -> tuple[Probe, list[float]]:
    """Train a pipeline with a probe; return the probe and the loss of each micro-batch."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)
    pipe = rd.Pipeline(
        make_model(seed),
        stages=STAGES,
        loss=F.cross_entropy,
        accumulate=accumulate,
        seed=seed,
        **options,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=rate, momentum=0.9),
    )
    probe = pipe.probe(every=every)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(TICKS):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        tick = pipe.step(images[chosen], targets[chosen])
        losses += [] if tick.loss is None else [tick.loss.item()]
    return probe, losses


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--picture")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.seeds} seeds, rate {args.rate}")
    print("| k | | loss of the last 100 | cosine to end-to-end by stage |")
    print("|---|---|---|---|")
    for accumulate in (1, 2, 4):
        for name, options in VARIANTS.items():
            probes, last = [], []
            for seed in range(args.seeds):
                try:
                    probe, losses = train(seed, options, accumulate, args.rate, args.every)
                except FloatingPointError:
                    last.append(float("nan"))
                    continue
                probes.append(probe)
                last.append(mean(losses[-100:]))
            qualities = [quality for probe in probes for quality in probe.qualities]
            by_stage = [[q.cosine for q in qualities if q.stage == j] for j in range(STAGES)]
            cosines = [mean(values or [float("nan")]) for values in by_stage]
            losses_text = " ".join(f"{loss:.2f}" for loss in last)
            shown = " ".join(f"{cosine:.2f}" for cosine in cosines)
            print(f"| {accumulate} | {name} | {losses_text} | {shown} |", flush=True)
            if args.picture and probes and accumulate == 2 and not options:
                probes[0].plot(args.picture)


if __name__ == "__main__":
    main()
