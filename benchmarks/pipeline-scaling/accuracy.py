"""Cost of latency in accuracy: a small RevNet on digits, each in one process.

The numbers of a pipeline do not depend on where its stages are, so one process is enough. The
gradient of stage j is 2 * latency * (J - 1 - j) micro-batches old, which is fewer updates if these
are larger. The learning rate is proportional to the size of an update.
"""

import math
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
import torch.multiprocessing as mp
from setting import Setting, loss
from torch import Tensor

import redivider as rd
from redivider.data.digits import read_digits

LATENCIES = (1, 2, 4)
ACCUMULATES = (2, 8)
SEEDS = 3
MICROBATCH = 8
EPOCHS = 5


def accuracy(setting: Setting, processes: list[int]) -> list[dict[str, Any]]:
    """Return a row for each size of an update, with a column for each latency."""
    cases = list(product(ACCUMULATES, LATENCIES, range(SEEDS)))
    with mp.get_context("spawn").Pool(max(processes), torch.set_num_threads, (1,)) as pool:
        results = dict(zip(cases, pool.starmap(train, cases, chunksize=1), strict=True))
    rows = []
    for accumulate in ACCUMULATES:
        row: dict[str, Any] = {"accumulate": accumulate, "found": []}
        for latency in LATENCIES:
            percents = [results[accumulate, latency, seed] for seed in range(SEEDS)]
            row[f"latency {latency}"] = f"{mean(percents):.1f} ± {stdev(percents):.1f}"
            row["found"].append(percents)
        rows.append(row)
    return rows


def train(accumulate: int, latency: int, seed: int) -> float:
    """Train; return the percentage of test images classified correctly."""
    images, labels = _digits(train=True)
    model = rd.create_model(
        "revnet18",
        width=16,
        depths=(3, 3),
        image_size=8,
        in_channels=1,
        num_classes=10,
        seed=seed,
    )
    num_ticks = EPOCHS * (len(labels) // MICROBATCH)
    num_updates = num_ticks // accumulate
    pipe = rd.Pipeline(
        model,
        stages="auto",
        loss=loss,
        optimizer=lambda stage: torch.optim.SGD(
            stage.parameters(), lr=0.1 * accumulate / 8, momentum=0.9, nesterov=True
        ),
        accumulate=accumulate,
        latency=latency,
        lr_lambda=lambda update: _factor(update / num_updates),
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels), generator=generator)
        for chosen in order.split(MICROBATCH):  # type: ignore[no-untyped-call]
            if len(chosen) == MICROBATCH:
                pipe.step(images[chosen], labels[chosen])
    pipe.flush()
    test_images, test_labels = _digits(train=False)
    right = pipe.evaluate(test_images).argmax(1) == test_labels
    return 100 * float(right.float().mean())


def _factor(progress: float) -> float:
    """Return the factor of the rate: an epoch of warm-up, then a cosine to zero."""
    return min(1.0, EPOCHS * progress) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _digits(*, train: bool) -> tuple[Tensor, Tensor]:
    digits = read_digits(train=train)
    return digits.pixels / 16, digits.labels
