"""The learning rate, as a factor of its highest value, by the number of an update."""

from dataclasses import dataclass
from math import cos, pi

from redivider.pipeline.tick import delay
from redivider.train.recipe import Recipe


def doubts(recipe: Recipe, per_epoch: int, num_stages: int = 1) -> list[str]:
    """What does not come to pass, or not well, in the run as it is asked for.

    Args:
        recipe: What is asked for.
        per_epoch: Micro-batches of an epoch.
        num_stages: Of a pipeline.
    """
    found = []
    if recipe.accumulate > recipe.epochs * per_epoch:
        found.append(
            f"one update takes {recipe.accumulate / per_epoch:.3g} epochs, more than "
            f"{recipe.epochs:g}: --accumulate is {recipe.accumulate}"
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


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then constant, steps down, or a cosine to zero.

    Args:
        recipe: What says so.
        num_per_epoch: Updates in an epoch, which may be a fraction.
        num_updates: Of the whole run.
    """

    recipe: Recipe
    num_per_epoch: float
    num_updates: int

    def __call__(self, update: int) -> float:
        """The factor of an update; the first one is 0."""
        recipe = self.recipe
        warm = recipe.warmup * self.num_per_epoch
        if update + 1 < warm:
            return (update + 1) / warm
        if recipe.schedule == "step":
            epoch = update / self.num_per_epoch
            return float(0.1 ** sum(epoch >= each - 1e-9 for each in recipe.milestones))
        if recipe.schedule == "cosine":
            done = (update - warm) / max(1.0, self.num_updates - warm)
            return 0.5 * (1 + cos(pi * min(1.0, max(0.0, done))))
        return 1.0
