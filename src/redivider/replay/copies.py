"""Copies of buffers, for a run whose changes to them shall not stay."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_to_spend(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules have copies of their own buffers; these are not touched, nor counted as if."""
    own = [(each, dict(each._buffers)) for each in modules if each._buffers]
    for each, buffers in own:
        each._buffers.update({k: v if v is None else v.clone() for k, v in buffers.items()})
    try:
        yield
    finally:
        for each, buffers in own:
            each._buffers.clear()  # of others that were made in the run
            each._buffers.update(buffers)
