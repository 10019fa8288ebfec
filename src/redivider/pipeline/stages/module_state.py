"""What the state of a pipeline has of a module: weights, buffers, and gradients summed so far.

Buffers that the module's own state_dict leaves out are in it too where they may move.
"""

from typing import Any

import torch
from torch import Tensor, nn

from redivider.replay.buffers import leaves_buffers_alone


def state_of(module: nn.Module, inner: nn.Module) -> dict[str, Any]:
    """All of it; `inner` is what runs, the module itself or a coupling's function."""
    state: dict[str, Any] = {
        "weights": module.state_dict(),
        "gradients": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }
    moving = {} if leaves_buffers_alone(inner) else _unsaved_buffers(module)
    return state | {"buffers": moving} if moving else state


def load_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Let a module go on from such a state."""
    module.load_state_dict(state["weights"])
    _load_buffers(module, state.get("buffers", {}))
    for name, parameter in module.named_parameters():
        parameter.grad = state["gradients"].get(name)


def places_of_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module that has a buffer, and its name there; also of those that are None for now."""
    return {
        f"{path}.{name}" if path else name: (each, name)
        for path, each in module.named_modules()
        for name in each._buffers
    }


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict().keys()
    return {name: each for name, each in module.named_buffers() if name not in saved}


@torch.no_grad()
def _load_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put buffers back, whatever has come to be in their place."""
    places = places_of_buffers(module) if saved else {}
    for path, value in saved.items():
        holder, name = places[path]
        now = holder._buffers[name]
        if now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
            holder._buffers[name] = value
        else:
            now.copy_(value)
