"""Optimizers of recipes."""

import torch
from torch import nn

from redivider.optim.muon import Muon
from redivider.train.recipe import Recipe


def make_optimizer(
    recipe: Recipe, module: nn.Module, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """Make an optimizer in whose groups weights decay, and norms and biases do not."""
    if recipe.optimizer == "muon":
        return _make_muon(recipe, module)
    trained = [param for param in module.parameters() if param.requires_grad]
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


def _make_muon(recipe: Recipe, module: nn.Module) -> Muon:
    optimizer = Muon(
        module,
        recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        scale=recipe.muon_scale,
        rest=recipe.muon_rest,
        rest_lr=recipe.muon_rest_lr,
    )
    _, rest = optimizer.param_groups
    vectors = [param for param in rest["params"] if param.dim() <= 1]
    rest["params"] = [param for param in rest["params"] if param.dim() > 1]
    if recipe.muon_rest == "adamw":
        rest["betas"] = recipe.betas
    optimizer.add_param_group({**rest, "params": vectors, "weight_decay": 0.0})
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param.requires_grad]
    return optimizer
