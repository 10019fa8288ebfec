"""Which ticks can be captured as CUDA graphs: what a pipeline, an optimizer and inputs must be."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from redivider.replay.autocast import Autocast

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


class Settings:
    """What graphs have built in, though a caller may change it between two ticks."""

    def __init__(self, pipe: Any) -> None:
        self._modules = [*pipe._chain.modules(), *pipe._loss.module.modules()]
        self._parameters = [each for stage in pipe.stages for each in stage.module.parameters()]
        self._groups = [group for stage in pipe.stages for group in stage.groups]

    def now(self) -> Any:
        """Training flags, which parameters train, and the optimizers' settings but for rates."""
        flags = [module.training for module in self._modules]
        trained = [each.requires_grad for each in self._parameters]
        return (
            flags,
            trained,
            [
                [id(value) if isinstance(value, Tensor) else value for value in _built_in(group)]
                for group in self._groups
            ],
        )


def _built_in(group: dict[str, Any]) -> list[Any]:
    return [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]


def look_of(inputs: Any) -> Any:
    """What inputs must have in common to be run by the same graphs."""
    leaves, spec = tree_flatten(inputs)
    looks = [
        (each.shape, each.dtype, each.device) if isinstance(each, Tensor) else each
        for each in leaves
    ]
    devices = {each.device for each in leaves if isinstance(each, Tensor)}
    autocast = [Autocast(device).settings for device in sorted(devices, key=str)]
    return spec, looks, autocast, torch.is_inference_mode_enabled()
