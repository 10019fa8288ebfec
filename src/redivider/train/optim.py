"""Optimizers of recipes."""

from collections.abc import Iterable

import torch
from torch import nn

from redivider.train.recipe import Recipe


def make_optimizer(
    recipe: Recipe, parameters: Iterable[nn.Parameter], *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """Make an optimizer with two groups: weights, which decay; norms and biases, which do not."""
    trained = [param for param in parameters if param.requires_grad]
    decayed = [param for param in trained if param.dim() > 1]
    others = [param for param in trained if param.dim() <= 1]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, recipe.weight_decay), (others, 0.0))
        if params
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fused)
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(
        groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=nesterov, fused=fused
    )
