"""Learning rate schedule: a factor of the peak rate for every update."""

from dataclasses import dataclass
from math import cos, pi

from redivider.train.recipe import Recipe


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a constant rate, steps down, or a cosine to zero.

    Args:
        recipe: Recipe with `warmup`, `schedule` and `milestones`.
        num_per_epoch: Updates per epoch, which may be a fraction.
        num_updates: Updates of the whole run.
    """

    recipe: Recipe
    num_per_epoch: float
    num_updates: int

    def __call__(self, update: int) -> float:
        """Return the factor of an update; the first update is 0."""
        recipe = self.recipe
        num_warmup = recipe.warmup * self.num_per_epoch
        if update + 1 < num_warmup:
            return (update + 1) / num_warmup
        if recipe.schedule == "step":
            epoch = update / self.num_per_epoch
            # The tolerance keeps a milestone on its update where the division rounds down.
            return float(0.1 ** sum(epoch >= milestone - 1e-9 for milestone in recipe.milestones))
        if recipe.schedule == "cosine":
            done = (update - num_warmup) / max(1.0, self.num_updates - num_warmup)
            return 0.5 * (1 + cos(pi * min(1.0, max(0.0, done))))
        return 1.0
