"""Counters of bytes, of CUDA's allocator or of torch's operations on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from redivider.checks.memory import Live, storages_of
from redivider.gpu.garbage import uncollected
from redivider.tree import tensors_of


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
    """Counter of CUDA's allocator. Its peaks are without gradients that were there before them.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._count("current")
        self._peaks: list[int] = []  # between moments
        self._grads = 0
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def bytes(self) -> int:
        return self._count("current") - self._before

    @property
    def moment(self) -> int:
        self._peaks.append(self._last)
        torch.cuda.reset_peak_memory_stats(self._device)
        return len(self._peaks)

    @property
    def _last(self) -> int:
        return self._count("peak") - self._grads

    def _count(self, kind: str) -> int:
        # Torch's other functions make a flat dict first, which takes longer than many units.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"][kind])

    def leave_out(self, grad: Tensor | None) -> None:
        """Do not count the gradient of a weight from now on."""
        _ = self.moment
        if grad is not None:  # it may be sparse, expanded, or a part of another tensor
            self._grads += min(size_of(grad), grad.numel() * grad.element_size())

    def peak_without(self, tensors: Any, since: int = 0, until: int | None = None) -> int:
        return max([*self._peaks, self._last][since:until]) - self._before


@contextmanager
def counting(device: torch.device | None, weights: Sequence[Tensor] = ()) -> Iterator[Meter]:
    """Count the bytes that are allocated inside, by CUDA's allocator or by torch's operations.

    On a GPU garbage of before would count as freed, so it stays until afterwards.

    Args:
        device: The GPU; None for the CPU.
        weights: Weights whose gradients do not count.
    """
    if device is None:
        with Live() as live:
            yield live
        return
    meter = _Allocator(device)
    hooks = [weight.register_hook(meter.leave_out) for weight in weights]  # type: ignore[no-untyped-call]
    try:
        with uncollected():
            yield meter
    finally:
        for hook in hooks:
            hook.remove()


def gpu_of(tree: Any) -> torch.device | None:
    """Return the GPU of the tensors, or None if they are on the CPU."""
    return next((tensor.device for tensor in tensors_of(tree) if tensor.is_cuda), None)


def size_of(tree: Any) -> int:
    """Return the bytes of the memory of some tensors, which may be sparse."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in storages_of(tree)}
    return sum(storages.values())


def address_of(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor."""
    return int(tensor.untyped_storage().data_ptr())
