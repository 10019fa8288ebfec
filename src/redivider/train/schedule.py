"""The learning rate, as a factor of its highest value, by the number of an update."""

from dataclasses import dataclass
from math import cos, pi

from redivider.train.recipe import Recipe


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
