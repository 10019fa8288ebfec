"""Prefetch of inputs: copy them from the host to the GPU while the last tick still runs."""

from typing import Any

import torch
from torch import Tensor

from redivider.tree import map_tensors, tensors_of


class Prefetch:
    """Copies from the host to a GPU, on a CUDA stream of its own.

    A copy on the stream of the ticks would wait for the last tick.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, inputs: Any) -> Any:
        """Return the inputs with all tensors on the GPU."""
        if not any(map(_is_on_host, tensors_of(inputs))):
            return inputs
        ticks = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = map_tensors(self._copy, inputs)
        ticks.wait_stream(self._stream)
        for tensor in tensors_of(copies):
            if tensor.is_cuda:
                # Else the allocator could reuse its memory while a tick still reads it.
                tensor.record_stream(ticks)
        return copies

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True) if _is_on_host(tensor) else tensor


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
