"""Prefetch of inputs: copy them from the host to the GPU while the last tick still runs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Prefetch:
    """Copies from the host to a GPU, on a CUDA stream of its own.

    A copy on the stream of the ticks would wait for the last tick.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, inputs: Any) -> Any:
        """Return the inputs with all tensors on the GPU."""
        if not any(map(_is_on_host, tree_leaves(inputs))):
            return inputs
        ticks = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = tree_map_only(Tensor, self._copy, inputs)
        ticks.wait_stream(self._stream)
        for leaf in tree_leaves(copies):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                # Else the allocator could reuse its memory while a tick still reads it.
                leaf.record_stream(ticks)
        return copies

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True) if _is_on_host(tensor) else tensor


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
