"""Copies of buffers, for a run whose changes are discarded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_to_spend(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace buffers by copies inside; the originals keep their values and versions."""
    originals = [(module, dict(module._buffers)) for module in modules if module._buffers]
    for module, buffers in originals:
        module._buffers.update({k: v if v is None else v.clone() for k, v in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in originals:
            module._buffers.clear()  # also of buffers that the run has created
            module._buffers.update(buffers)
