"""Which ticks can be captured as CUDA graphs: what a pipeline, an optimizer and inputs must be."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from redivider.replay.autocast import Autocast

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def reason_against(pipe: Any) -> str | None:
    """Why the ticks of a pipeline cannot be recorded, if they cannot."""
    if pipe.method.weights != "current":
        return f"{pipe.method.name} keeps old weights, whose number changes"
    if pipe.arithmetic.exact:
        return "a stream that leaves its grid must stop the pipeline at once"
    for stage in pipe.stages:
        if not all(group.get("fused") for group in stage.groups):
            kind = type(stage.optimizer).__name__
            return f"{kind} is not fused, and could not skip an update after a fault (fused=True)"
    return None


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


class Settings:
    """What graphs have built in, though a caller may change it between two ticks."""

    def __init__(self, pipe: Any) -> None:
        self._modules = [*pipe._chain.modules(), *pipe._loss.module.modules()]
        self._parameters = [each for stage in pipe.stages for each in stage.module.parameters()]
        self._groups = [group for stage in pipe.stages for group in stage.groups]
        self._optimizers = [stage.optimizer for stage in pipe.stages]

    def now(self) -> Any:
        """All of it: flags, which parameters train, where they are, how optimizers are set."""
        flags = [module.training for module in self._modules]
        parameters = [(each.requires_grad, each.data_ptr()) for each in self._parameters]
        hooked = [has_hooks(each) for each in self._optimizers]
        return flags, parameters, hooked, [_built_in(group) for group in self._groups]


def _built_in(group: dict[str, Any]) -> list[Any]:
    """The settings of a group but for its rate, which the host sends."""
    others = [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]
    return [id(value) if isinstance(value, Tensor) else value for value in others]


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    # What may change behind our backs is never the same: such ticks are not captured.
    return value if isinstance(value, PLAIN) else object()


def look_of(inputs: Any) -> Any:
    """What inputs must have in common to be run by the same graphs."""
    leaves, spec = tree_flatten(inputs)
    looks = [_look(each) for each in leaves]
    devices = {each.device for each in leaves if isinstance(each, Tensor)}
    autocast = [Autocast(device).settings for device in sorted(devices, key=str)]
    return spec, looks, autocast, torch.is_inference_mode_enabled()
