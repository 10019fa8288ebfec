"""Which ticks can be captured as CUDA graphs: what a pipeline, an optimizer and inputs must be."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from redivider.pipeline.stages.fused_optimizer import has_hooks, rate_dtype
from redivider.replay.autocast import Autocast

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def reason_against(pipe: Any) -> str | None:
    """Why the ticks of a pipeline cannot be recorded, if they cannot."""
    if pipe.method.weights != "current":
        return f"{pipe.method.name} keeps old weights, whose number changes"
    if pipe.arithmetic.exact:
        return "a stream that leaves its grid must stop the pipeline at once"
    if pipe.is_spread:
        return "stages are in several processes"
    if pipe.packing.dtype is not None:
        return "messages are packed"
    for stage in pipe.stages:
        for each in stage.module.parameters():
            if each.dtype.itemsize > rate_dtype(each.device).itemsize:
                return f"learning rates would be {rate_dtype(each.device)}, weights {each.dtype}"
        if not all(group.get("fused") for group in stage.groups):
            kind = type(stage.optimizer).__name__
            return f"{kind} is not fused, and could not skip an update after a fault (fused=True)"
    return None


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
