"""Checks of a pipeline's arguments: a mistake raises at construction, not some ticks later."""

from math import inf
from numbers import Integral, Real
from typing import Any

import torch

from redivider.pipeline.schedule import verify_latency
from redivider.pipeline.stages.lookahead import LOOKAHEADS
from redivider.pipeline.stages.stage import Stage

EXAMPLE = "lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1)"


def verify_arguments(
    *,
    loss: Any,
    optimizer: Any,
    accumulate: Any,
    lr_lambda: Any,
    lr_by_delay: Any,
    latency: Any,
    lookahead: Any,
    clip_norm: Any,
    clip_over: Any,
) -> None:
    """Refuse arguments of `Pipeline` by which it cannot train."""
    if not isinstance(accumulate, Integral) or int(accumulate) < 1:
        raise ValueError(f"accumulate must be a whole number, at least 1, got {accumulate!r}")
    verify_latency(latency)
    is_norm = isinstance(clip_norm, Real) and 0 < float(clip_norm) < inf
    if clip_norm is not None and not is_norm:
        raise ValueError(f"clip_norm must be None or a number above 0, got {clip_norm!r}")
    if clip_over not in ("stage", "all"):
        raise ValueError(f'clip_over must be "stage" or "all", got {clip_over!r}')
    if not isinstance(lookahead, bool | str | None) or lookahead not in LOOKAHEADS:
        raise ValueError(f'lookahead must be True, False or "lead", got {lookahead!r}')
    if not callable(loss) or (isinstance(loss, type) and issubclass(loss, torch.nn.Module)):
        hint = f"; {loss.__name__}() makes one" if isinstance(loss, type) else ""
        raise TypeError(
            f"loss must be a function or module of (output, target), got {loss!r}{hint}"
        )
    if lr_lambda is not None and not callable(lr_lambda):
        raise TypeError(f"lr_lambda must be a function of the update's number, got {lr_lambda!r}")
    if not isinstance(lr_by_delay, bool):
        raise TypeError(f"lr_by_delay must be True or False, got {lr_by_delay!r}")
    # A class of torch takes parameters, not a stage. A class of the caller may take a stage.
    is_torch_class = isinstance(optimizer, type) and optimizer.__module__.startswith("torch.optim")
    if not callable(optimizer) or is_torch_class:
        raise TypeError(
            f"optimizer must be a function that makes one for a stage, such as {EXAMPLE}, got "
            f"{optimizer.__name__ if is_torch_class else type(optimizer).__name__}"
        )


def verify_optimizer(optimizer: Any, stage: Stage) -> None:
    """Refuse an optimizer that cannot train its stage.

    Args:
        optimizer: Result of the caller's function.
        stage: The stage that the function was called for.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must return a torch.optim.Optimizer, such as {EXAMPLE}, got "
            f"{type(optimizer).__name__} for stage {stage.index}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS computes the loss several times in a step, which a pipeline cannot; take another"
        )
    own = set(stage.module.parameters())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    others = [param for param in params if param not in own]
    if others:
        raise ValueError(
            f"the optimizer made for stage {stage.index} has {len(others)} parameters that are not "
            f"of that stage; make it of the stage that is passed in: {EXAMPLE}"
        )
