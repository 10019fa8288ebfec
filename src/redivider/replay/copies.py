"""Copies of buffers, for a run whose changes are discarded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


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
