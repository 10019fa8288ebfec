"""Conditions for capturing ticks as CUDA graphs, on the pipeline, its settings and its inputs."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from redivider.pipeline.stages.fused_optimizer import has_hooks, rate_dtype
from redivider.replay.autocast import Autocast

if TYPE_CHECKING:
    from redivider.pipeline.pipeline import Pipeline

_IS_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def reason_against(pipe: "Pipeline") -> str | None:
    """Return why the ticks of a pipeline cannot be captured; None if they can."""
    if pipe.method.weights != "current":
        return f"{pipe.method.name} keeps old weights, whose number changes"
    if pipe.arithmetic.exact:
        return "a stream that leaves its grid must stop the pipeline at once"
    for stage in pipe.stages:
        for param in stage.module.parameters():
            # A captured tick reads its learning rates from a tensor on the device.
            if param.dtype.itemsize > rate_dtype(param.device).itemsize:
                return f"learning rates would be {rate_dtype(param.device)}, weights {param.dtype}"
        if not all(group.get("fused") for group in stage.groups):
            kind = type(stage.optimizer).__name__
            return f"{kind} is not fused, and could not skip an update after a fault (fused=True)"
    return None


class Settings:
    """Settings of a pipeline that graphs have built in, but that a caller may change."""

    def __init__(self, pipe: "Pipeline") -> None:
        self._modules = [*pipe._chain.modules(), *pipe._loss.module.modules()]
        self._params = [param for stage in pipe.stages for param in stage.module.parameters()]
        self._groups = [group for stage in pipe.stages for group in stage.groups]
        self._optimizers = [stage.optimizer for stage in pipe.stages]

    def current(self) -> Any:
        """Return the current settings, comparable by ==.

        They are the training flags, which parameters train and where they lie, and the optimizers'
        hooks and options.
        """
        flags = list(map(_IS_TRAINING, self._modules))  # without a frame for every module
        trains = list(map(_REQUIRES_GRAD, self._params))
        places = list(map(Tensor.data_ptr, self._params))
        hooked = list(map(has_hooks, self._optimizers))
        return flags, trains, places, hooked, list(map(_built_in, self._groups))


def _built_in(group: dict[str, Any]) -> list[Any]:
    """Return the options of a parameter group, without the rate, which the host sends."""
    options = [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]
    return [id(value) if isinstance(value, Tensor) else value for value in options]


def signature_of(inputs: Any, device: torch.device) -> Any:
    """Return what inputs must have in common to be run by the same graphs, comparable by ==.

    Args:
        inputs: Inputs of a step.
        device: Device of the pipeline; not every process has inputs.
    """
    return _signature(inputs), Autocast(device).settings


def _signature(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.device
    if isinstance(tree, PLAIN):
        return tree
    # The usual trees are compared without a walk by pytree, which costs more.
    if type(tree) in (tuple, list):
        return type(tree), [_signature(item) for item in tree]
    if type(tree) is dict:
        return list(tree), [_signature(value) for value in tree.values()]
    leaves, spec = tree_flatten(tree)
    # An object that may change without our notice equals nothing: such ticks are not captured.
    return object() if spec.is_leaf() else (spec, [_signature(leaf) for leaf in leaves])
