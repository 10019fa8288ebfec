"""Optimizers with fused kernels, which can skip a step and read their rate on the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Turn on an optimizer's fused kernels, if it has any and the caller chose nothing else."""
    if type(optimizer) not in FUSED:
        return
    for group in optimizer.param_groups:
        trained = [param for param in group["params"] if param.requires_grad]
        is_chosen = group["fused"] is not None or group["foreach"] is not None
        if not (is_chosen or group["differentiable"]) and all(param.is_cuda for param in trained):
            group["fused"] = True
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if group["fused"] and "capturable" in group:
            # Fused Adam counts its steps on the device anyway, but refuses a capture without this.
            group["capturable"] = True


@contextmanager
def unfused_where_new(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Turn fused SGD off, during a step, for groups where only some parameters have a momentum.

    The fused kernel fails on such a group.
    """
    mixed = []
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        trained = [param for param in group["params"] if param.grad is not None]
        has_momentum = [optimizer.state[p].get("momentum_buffer") is not None for p in trained]
        if group["fused"] and group["momentum"] and any(has_momentum) and not all(has_momentum):
            mixed.append(group)
    for group in mixed:
        group["fused"] = False
    try:
        yield
    finally:
        for group in mixed:
            group["fused"] = True


def has_hooks(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer has hooks before or after its steps."""
    if optimizer is None:
        return False
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def rate_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a learning rate in fused kernels: float32 on a GPU, float64 on a CPU."""
    return torch.float64 if device.type == "cpu" else torch.float32
