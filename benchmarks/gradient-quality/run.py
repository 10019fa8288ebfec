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

WIDTH, STAGES, BATCH, TICKS = 64, 10, 16, 600
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "look-ahead": {"lookahead": "momentum"},
    "rates by delay": {"lr_by_delay": True},
}


def make_model(seed: int) -> rd.Chain:
    """Stem, eight couplings, fusion and head: with ten stages one unit each but for the ends."""
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


def train(seed: int, way: dict[str, Any], accumulate: int, rate: float, every: int):
    """Train a pipeline, probed; return the probe and the loss of each micro-batch."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)
    pipe = rd.Pipeline(
        make_model(seed),
        stages=STAGES,
        loss=F.cross_entropy,
        accumulate=accumulate,
        seed=seed,
        **way,
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
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {given.seeds} seeds, rate {given.rate}")
    print("| k | | loss of the last 100 | cosine to end-to-end by stage |")
    print("|---|---|---|---|")
    for accumulate in (1, 2, 4):
        for name, way in WAYS.items():
            probes, last = [], []
            for seed in range(given.seeds):
                try:
                    probe, losses = train(seed, way, accumulate, given.rate, given.every)
                except FloatingPointError:
                    last.append(float("nan"))
                    continue
                probes.append(probe)
                last.append(mean(losses[-100:]))
            found = [each for probe in probes for each in probe.found]
            cosines = [
                mean([each.cosine for each in found if each.stage == j] or [float("nan")])
                for j in range(STAGES)
            ]
            losses_text = " ".join(f"{each:.2f}" for each in last)
            shown = " ".join(f"{each:.2f}" for each in cosines)
            print(f"| {accumulate} | {name} | {losses_text} | {shown} |", flush=True)
            if given.picture and probes and accumulate == 2 and not way:
                probes[0].plot(given.picture)


if __name__ == "__main__":
    main()
