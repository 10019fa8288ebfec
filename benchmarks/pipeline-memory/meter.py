"""Bytes in use on a device, since a meter was entered."""

import gc
from typing import Any

import torch

from redivider.checks.memory import Live


class Allocator:
    """By CUDA's allocator: what it has given out, in the sizes that it gives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def __enter__(self) -> "Allocator":
        gc.collect()
        torch.cuda.empty_cache()  # pieces of other sizes would be given out whole
        self._base = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    @property
    def bytes(self) -> int:
        """Now."""
        return torch.cuda.memory_allocated(self._device) - self._base

    @property
    def peak(self) -> int:
        """At most, since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def reset_peak(self) -> None:
        """Begin anew with what is in use."""
        torch.cuda.reset_peak_memory_stats(self._device)


class Storages(Live):
    """By the storages that torch has made and that are alive: a CPU has no such allocator."""

    def reset_peak(self) -> None:
        """Begin anew with what is in use."""
        self.peak = self.bytes


def meter_of(device: torch.device) -> Allocator | Storages:
    """The meter for a device."""
    return Allocator(device) if device.type == "cuda" else Storages()
