"""Runs that leave buffers and random state as they were."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def restored_state(module: nn.Module, devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the buffers of a module afterwards, and random state of the CPU and of devices."""
    # A run may create a buffer, or replace one by another tensor.
    buffers = [(child, dict(child._buffers)) for child in module.modules()]
    values = {buffer: buffer.clone() for buffer in module.buffers()}
    gpus = {device for device in devices if device.type not in ("cpu", "meta")}
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            for child, originals in buffers:
                child._buffers.clear()
                child._buffers.update(originals)
            with torch.no_grad():
                for buffer, value in values.items():
                    if buffer.is_meta or torch.equal(buffer, value):
                        continue  # a write would raise its version, and count as a change
                    buffer.copy_(value)
