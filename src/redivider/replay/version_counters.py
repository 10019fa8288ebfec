"""Version counters of weights that fused optimizers change.

Autograd detects weights that change between a forward and its backward by their version counters.
Fused optimizers write to the weights without raising them, and a backward that runs `f` again would
silently use other weights than the forward. So a hook raises the counters for them.
"""

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@cache
def count_fused_steps() -> None:
    """From now on, raise the version counters of weights after every fused optimizer step."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(
                [param for param in group["params"] if param.grad is not None]
            )
