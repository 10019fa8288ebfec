"""Optimizers as recipes ask for them."""

from collections.abc import Iterable

import torch
from torch import nn

from redivider.train.recipe import Recipe


def make_optimizer(
    recipe: Recipe, parameters: Iterable[nn.Parameter], *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """An optimizer with two groups: weights that decay; norms and biases, which do not."""
    trained = [each for each in parameters if each.requires_grad]
    decayed = [each for each in trained if each.dim() > 1]
    others = [each for each in trained if each.dim() <= 1]
    groups = [
        {"params": some, "weight_decay": decay}
        for some, decay in ((decayed, recipe.weight_decay), (others, 0.0))
        if some
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fused)
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(
        groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=nesterov, fused=fused
    )
