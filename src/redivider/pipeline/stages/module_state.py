"""State of a module in the state of a pipeline: weights, buffers, and gradients summed so far.

It includes buffers that the module's own state_dict leaves out, if a run may change them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from redivider.replay.buffers import leaves_buffers_alone


def state_of(module: nn.Module, inner: nn.Module) -> dict[str, Any]:
    """Return the state of a module.

    Args:
        module: The module.
        inner: The module that runs: `module` itself, or a coupling's f.
    """
    state: dict[str, Any] = {
        "weights": module.state_dict(),
        "gradients": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }
    buffers = {} if leaves_buffers_alone(inner) else _unsaved_buffers(module)
    return state | {"buffers": buffers} if buffers else state


def load_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load a state into a module."""
    module.load_state_dict(state["weights"])
    _load_buffers(module, state.get("buffers", {}))
    for name, parameter in module.named_parameters():
        parameter.grad = state["gradients"].get(name)


def places_of_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return, by full name, the submodule of every buffer and the buffer's name in it.

    Buffers that are None are included.
    """
    return {
        f"{path}.{name}" if path else name: (submodule, name)
        for path, submodule in module.named_modules()
        for name in submodule._buffers
    }


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


@torch.no_grad()
def _load_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Restore buffers, also where the current one has another shape or dtype, or is None."""
    places = places_of_buffers(module) if saved else {}
    for path, value in saved.items():
        submodule, name = places[path]
        buffer = submodule._buffers[name]
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            submodule._buffers[name] = value
        else:
            buffer.copy_(value)
