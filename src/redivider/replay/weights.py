"""Weights that change between a forward and its backward are found by autograd's version counters.

Fused optimizers write to the weights without counting. A backward that runs `f` again would then
use other weights than the forward, in silence; so their steps are counted for them.
"""

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@cache
def count_fused_steps() -> None:
    """From now on, let a step of any fused optimizer count as a change of the weights it had."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(
                [each for each in group["params"] if each.grad is not None]
            )
