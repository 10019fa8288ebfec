"""Warnings about a recipe that will not do what it seems to, printed when its run begins."""

import os

from redivider.pipeline.schedule import Schedule
from redivider.train.recipe import Recipe


def find_warnings(
    recipe: Recipe, per_epoch: int, num_stages: int = 1, reverses: bool = True
) -> list[str]:
    """Return warnings about settings that have no effect or train badly.

    Args:
        recipe: Recipe of the run.
        per_epoch: Micro-batches per epoch.
        num_stages: Number of pipeline stages; 1 without a pipeline.
        reverses: Whether the model has couplings.
    """
    warnings = []
    if recipe.accumulate > recipe.epochs * per_epoch:
        warnings.append(
            f"one update takes {recipe.accumulate / per_epoch:.3g} epochs, more than "
            f"{recipe.epochs:g}: --microbatch is {recipe.microbatch}, "
            f"--accumulate {recipe.accumulate}"
        )
    by_method = not reverses and recipe.memory is None
    if by_method and recipe.method in ("reverse", "overlap", "auto"):
        warnings.append(
            f"{recipe.model} has no couplings to reverse, so that {recipe.method} keeps what store "
            "does: use a model of rev_* or revnet*, or --method checkpoint"
        )
    num_cores = os.cpu_count() or 1
    if recipe.threads > num_cores:
        warnings.append(
            f"more threads than cores are slow: --threads is {recipe.threads}, of {num_cores} cores"
        )
    if recipe.warmup >= recipe.epochs:
        warnings.append(
            f"the rate rises for all of the {recipe.epochs:g} epochs: --warmup is {recipe.warmup:g}"
        )
    late = [milestone for milestone in recipe.milestones if milestone >= recipe.epochs]
    if late and recipe.schedule == "step":
        warnings.append(
            f"the run ends before the rate falls after {', '.join(f'{epoch:g}' for epoch in late)} "
            "epochs: set --milestones as well"
        )
    num_late = Schedule(num_stages, recipe.latency).num_in_flight / recipe.accumulate
    if num_late > 1 and recipe.optimizer == "adamw":
        warnings.append(
            f"the first stage's gradients are {num_late:.3g} updates late, and AdamW learns badly "
            "from more than one: use --optimizer muon, or set --stages lower, or --microbatch "
            "lower and --accumulate higher"
        )
    return warnings
