"""Best known settings: PETRA about as accurate as backprop, by Muon and half the delay.

experiments/muon has their results, beside those of backprop with the same optimizer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from redivider.train.recipe import Recipe
from redivider.train.recipes.petra import table2
from redivider.train.recipes.transformers import cifar10, text

CONVOLUTIONS: dict[str, Any] = {
    "optimizer": "muon",
    "momentum": 0.6,
    "muon_scale": "spectral",
    "muon_rest": "sgd",
    "weight_decay": 0.01,
    "schedule": "cosine",
}
"""Settings of Muon that suit convolutional networks, whatever their rate."""


def revnet18() -> Recipe:
    """Return a recipe for 20 epochs of CIFAR-10; for more, set epochs alone."""
    return replace(
        table2("revnet18", "cifar10", "petra"),
        name="revnet18-cifar10-best",
        latency=0.5,
        epochs=20,
        lr=0.05,
        warmup=1,
        milestones=(),
        precision="bf16",
        **CONVOLUTIONS,
    )


def vit() -> Recipe:
    """Return a recipe for 10 epochs of CIFAR-10, with 128 images in an update."""
    return replace(
        cifar10("rev_vit_small", patch_size=4),
        name="rev_vit_small-cifar10-best",
        method="petra",
        stages=8,
        microbatch=4,
        accumulate=32,
        latency=0.5,
        epochs=10,
        warmup=2,
        optimizer="muon",
        lr=1e-3,
        momentum=0.95,
        muon_rest_lr=2.5e-4,
    )


def gpt() -> Recipe:
    """Return a recipe for one epoch of a text of about 20 MB, with 32,768 bytes in an update."""
    return replace(
        text("rev_gpt_small", 1024, 1, 2e-3),
        name="rev_gpt_small-text-best",
        method="petra",
        stages=8,
        accumulate=32,
        latency=0.5,
        epochs=1,
        optimizer="muon",
        momentum=0.95,
        muon_rest_lr=5e-4,
    )


RECIPES: list[Callable[[], Recipe]] = [revnet18, vit, gpt]
