"""Counters of bytes, of CUDA's allocator or of torch's operations on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from redivider.checks.memory import Live


class Meter(Protocol):
    """Counter of bytes."""

    @property
    def bytes(self) -> int:
        """Bytes that have been allocated and are still there."""

    @property
    def moment(self) -> int:
        """The present, for `peak_without`."""

    def peak_without(self, tensors: Any, since: int = 0, until: int | None = None) -> int:
        """Return the largest number of bytes between moments, without those of some tensors."""


class _Allocator:
    """Counter of CUDA's allocator. Its peaks are without gradients that were there before them."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        self._peaks: list[int] = []  # between moments
        self._grads = 0
        torch.cuda.reset_peak_memory_stats()

    @property
    def bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def moment(self) -> int:
        self._peaks.append(torch.cuda.max_memory_allocated() - self._grads)
        torch.cuda.reset_peak_memory_stats()
        return len(self._peaks)

    def leave_out(self, grad: Tensor | None) -> None:
        """Do not count the gradient of a weight from now on."""
        _ = self.moment
        self._grads += 0 if grad is None else grad.nbytes

    def peak_without(self, tensors: Any, since: int = 0, until: int | None = None) -> int:
        last = torch.cuda.max_memory_allocated() - self._grads
        return max([*self._peaks, last][since:until]) - self._before


@contextmanager
def counting(is_cuda: bool, weights: Sequence[Tensor] = ()) -> Iterator[Meter]:
    """Count the bytes that are allocated inside, by CUDA's allocator or by torch's operations.

    Args:
        is_cuda: Whether to count those of a GPU.
        weights: Weights whose gradients do not count.
    """
    if not is_cuda:
        with Live() as live:
            yield live
        return
    meter = _Allocator()
    hooks = [weight.register_hook(meter.leave_out) for weight in weights]  # type: ignore[no-untyped-call]
    try:
        yield meter
    finally:
        for hook in hooks:
            hook.remove()
