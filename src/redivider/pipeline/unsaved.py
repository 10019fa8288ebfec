"""Buffers that a state_dict leaves out, in the state of a pipeline: units may move them."""

import torch
from torch import Tensor, nn

from redivider.replay.buffers import leaves_buffers_alone


def unsaved_buffers(module: nn.Module, inner: nn.Module) -> dict[str, Tensor]:
    """The buffers that its state_dict leaves out, unless `inner`, which runs, leaves them alone."""
    if leaves_buffers_alone(inner):
        return {}
    saved = module.state_dict().keys()
    return {name: each for name, each in module.named_buffers() if name not in saved}


def places_of_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module that has a buffer, and its name there; also of those that are None for now."""
    return {
        f"{path}.{name}" if path else name: (each, name)
        for path, each in module.named_modules()
        for name in each._buffers
    }


@torch.no_grad()
def load_unsaved(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put such buffers back, whatever has come to be in their place."""
    places = places_of_buffers(module) if saved else {}
    for path, value in saved.items():
        holder, name = places[path]
        now = holder._buffers[name]
        if now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
            holder._buffers[name] = value
        else:
            now.copy_(value)
