"""What the host tells a captured tick, which can ask nothing: numbers and learning rates."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Control:
    """Small tensors on a device that the host fills before a replay.

    Args:
        device: Where they are.
        num_numbers: How many integers.
        num_rates: How many learning rates.
    """

    def __init__(self, device: torch.device, num_numbers: int, num_rates: int) -> None:
        self.numbers = torch.zeros(num_numbers, dtype=torch.int64, device=device)
        self.rates = torch.zeros(num_rates, dtype=rate_dtype(device), device=device)
        self._rates: list[float] = []

    def send(self, numbers: Sequence[int], rates: Sequence[float]) -> None:
        """Fill them, before what is launched next; nobody waits."""
        _send(numbers, self.numbers)
        if list(rates) != self._rates:
            self._rates = list(rates)
            _send(rates, self.rates)


def rate_dtype(device: torch.device) -> torch.dtype:
    """Fused kernels on a GPU read a rate as float32, those on the CPU as double."""
    return torch.float64 if device.type == "cpu" else torch.float32


def _send(values: Sequence[float], target: Tensor) -> None:
    # The host's memory is not used again before it was read: torch's allocator sees to that.
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(host, non_blocking=True)
