"""What a run as it is asked for will not do, or not well: said when it begins."""

import os

from redivider.pipeline.schedule import delay
from redivider.train.recipe import Recipe


def doubts(recipe: Recipe, per_epoch: int, num_stages: int = 1, reverses: bool = True) -> list[str]:
    """What does not come to pass, or not well, in the run as it is asked for.

    Args:
        recipe: What is asked for.
        per_epoch: Micro-batches of an epoch.
        num_stages: Of a pipeline.
        reverses: Whether the model has couplings.
    """
    found = []
    if recipe.accumulate > recipe.epochs * per_epoch:
        found.append(
            f"one update takes {recipe.accumulate / per_epoch:.3g} epochs, more than "
            f"{recipe.epochs:g}: --microbatch is {recipe.microbatch}, "
            f"--accumulate {recipe.accumulate}"
        )
    if not reverses and recipe.method in ("reverse", "overlap", "auto"):
        found.append(
            f"{recipe.model} has no couplings to reverse, so that {recipe.method} keeps what store "
            "does: take a model of rev_* or revnet*, or --method checkpoint"
        )
    num_cores = os.cpu_count() or 1
    if recipe.threads > num_cores:
        found.append(
            f"more threads than cores are slow: --threads is {recipe.threads}, of {num_cores} cores"
        )
    if recipe.warmup >= recipe.epochs:
        found.append(
            f"the rate rises for all of the {recipe.epochs:g} epochs: --warmup is {recipe.warmup:g}"
        )
    late = [each for each in recipe.milestones if each >= recipe.epochs]
    if late and recipe.schedule == "step":
        found.append(
            f"the run ends before the rate falls after {', '.join(f'{each:g}' for each in late)} "
            "epochs: set --milestones as well"
        )
    num_late = delay(0, num_stages, recipe.latency) / recipe.accumulate
    if num_late > 1 and recipe.optimizer == "adamw":
        found.append(
            f"the first stage's gradients are {num_late:.3g} updates late, and AdamW learns badly "
            "from more than one: set --stages lower, or --microbatch lower and --accumulate higher"
        )
    return found
