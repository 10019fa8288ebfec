"""Copies of buffers, for a run whose changes are discarded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def remember_buffers(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Return a function that restores the buffers of modules, also those that a run replaces."""
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = {buffer: buffer.clone() for module in modules for buffer in module.buffers(False)}

    def restore() -> None:
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, value in values.items():
                if buffer.is_meta or torch.equal(buffer, value):
                    continue  # a write would raise its version, and count as a change
                buffer.copy_(value)

    return restore


@contextmanager
def buffers_to_spend(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace buffers by copies inside; the originals keep their values and versions."""
    originals = [(module, dict(module._buffers)) for module in modules]
    copies: dict[Tensor | None, Tensor | None] = {None: None}  # modules may share a buffer
    for module, buffers in originals:
        for name, buffer in buffers.items():
            if buffer is not None and buffer not in copies:
                copies[buffer] = buffer.clone()
            module._buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for module, buffers in originals:
            module._buffers.clear()  # also of buffers that the run has created
            module._buffers.update(buffers)
