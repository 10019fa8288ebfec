"""Optimizers that run in fused kernels, which can skip a step and read their rate on a device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer use its fused kernels, if it has some and its maker chose nothing else."""
    if type(optimizer) not in FUSED:
        return
    for group in optimizer.param_groups:
        trained = [each for each in group["params"] if each.requires_grad]
        chosen = group["fused"] is not None or group["foreach"] is not None
        if not (chosen or group["differentiable"]) and all(each.is_cuda for each in trained):
            group["fused"] = True
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if group["fused"] and "capturable" in group:
            group["capturable"] = True  # Adam asks for it, though fused steps are counted there


@contextmanager
def unfused_where_new(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Surround a step: fused SGD fails where some parameters have a momentum and some have none."""
    mixed = []
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        trained = [each for each in group["params"] if each.grad is not None]
        known = [optimizer.state[p].get("momentum_buffer") is not None for p in trained]
        if group["fused"] and group["momentum"] and any(known) and not all(known):
            mixed.append(group)
    for group in mixed:
        group["fused"] = False
    try:
        yield
    finally:
        for group in mixed:
            group["fused"] = True


def has_hooks(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether somebody wants to be told of an optimizer's steps."""
    if optimizer is None:
        return False
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def rate_dtype(device: torch.device) -> torch.dtype:
    """Fused kernels on a GPU read a rate as float32, those on the CPU as double."""
    return torch.float64 if device.type == "cpu" else torch.float32
