"""Bytes in use on a device, since a meter was entered."""

import gc
from typing import Any

import torch

from redivider.checks.memory import Live


class Allocator:
    """Meter of the bytes that CUDA's allocator has in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def __enter__(self) -> "Allocator":
        gc.collect()
        torch.cuda.empty_cache()  # cached blocks may be larger than asked for
        self._base = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    @property
    def bytes(self) -> int:
        """Bytes in use now."""
        return torch.cuda.memory_allocated(self._device) - self._base

    @property
    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def reset_peak(self) -> None:
        """Restart the peak at the bytes in use now."""
        torch.cuda.reset_peak_memory_stats(self._device)


class Storages(Live):  # type: ignore[no-untyped-call]
    """Meter of live storages, for a CPU, whose allocator keeps no statistics."""

    def reset_peak(self) -> None:
        """Restart the peak at the bytes in use now."""
        self.peak = self.bytes


def meter_of(device: torch.device) -> Allocator | Storages:
    """Return a meter for a device."""
    return Allocator(device) if device.type == "cuda" else Storages()
