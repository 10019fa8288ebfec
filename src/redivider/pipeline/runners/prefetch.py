"""Inputs that come from the host: copied to the GPU while the last tick runs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Feed:
    """Brings what is on the host to a GPU, on a CUDA stream of its own.

    What a caller copies on the stream of the ticks has to wait for the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, inputs: Any) -> Any:
        """The same inputs, all on the GPU."""
        if not any(map(_is_on_host, tree_leaves(inputs))):
            return inputs
        ticks = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            found = tree_map_only(Tensor, self._copy, inputs)
        ticks.wait_stream(self._stream)
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.is_cuda:
                each.record_stream(ticks)
        return found

    def _copy(self, each: Tensor) -> Tensor:
        return each.to(self._device, non_blocking=True) if _is_on_host(each) else each


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
