"""Checkpoints in host memory: inputs of units wait there between forward and backward.

Copies run on a CUDA stream of their own (the side lane), beside the units:

    forward    main    F(0)    F(1)     F(2)     F(3)
               side            out(0)   out(1)   out(2)              to the host
    backward   main    B(3)    B(2)     B(1)     B(0)
               side    in(1)   in(0)                                 and back, one unit ahead

The last NUM_LEAVING inputs stay on the device, too: the backward needs them first. Where copies are
slower than units, a unit waits until all but that many have left, so that memory stays small.

Memory of the side lane is reused by that lane alone, after a wait for all work of the main one.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.backward.node import KeptInput
from redivider.backward.overlap import MAIN, SIDE, CudaLanes, Lanes
from redivider.replay import Call
from redivider.replay.call import GraphRun

NUM_LEAVING = 2  # units whose inputs may be on their way to the host


class Waiting:
    """Inputs of one unit: on the host, on the device, or on their way.

    Args:
        host: Copies on the host.
        device: The inputs on the device.
        copied: Event after the copies.
        before: Inputs of the unit before.
    """

    def __init__(
        self, host: list[Tensor], device: list[Tensor], copied: Any, before: "Waiting | None"
    ) -> None:
        self.host, self.copied, self.before = host, copied, before
        self.device: list[Tensor] | None = device


class Offload:
    """Inputs that wait on the host, of one forward pass and its backward.

    Args:
        device: Device of the units.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = self._make_lanes()
        self._leaving: deque[Waiting] = deque()
        self._last: Waiting | None = None

    def push(self, tensors: Sequence[Tensor]) -> Waiting:
        """Send the inputs of the next unit to the host."""
        lanes = self._lanes
        lanes.wait(SIDE, lanes.mark(MAIN))
        with lanes.on(SIDE):
            host = [_copy_to_host(tensor) for tensor in tensors]
        inputs = [tensor.detach() for tensor in tensors]
        self._last = Waiting(host, inputs, lanes.mark(SIDE), self._last)
        self._leaving.append(self._last)
        if len(self._leaving) > NUM_LEAVING:
            left = self._leaving.popleft()
            lanes.wait(MAIN, left.copied)  # before its memory is used again
            left.device = None
        return self._last

    def fetch(self, waiting: Waiting) -> list[Tensor]:
        """Return inputs on the device, and begin to bring back those of the unit before."""
        self._leaving.clear()
        if waiting.device is None:
            self._bring(waiting)
        self._lanes.wait(MAIN, waiting.copied)
        device, waiting.device = waiting.device, None
        if waiting.before is not None and waiting.before.device is None:
            self._bring(waiting.before)
        assert device is not None
        return device

    def _bring(self, waiting: Waiting) -> None:
        lanes = self._lanes
        lanes.wait(SIDE, lanes.mark(MAIN))
        with lanes.on(SIDE):
            waiting.device = [
                torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)
                for tensor in waiting.host
            ]
        waiting.copied = lanes.mark(SIDE)

    def make_kept(self, name: str, call: Call, *, with_graph: bool, num_inputs: int) -> KeptInput:
        """Return the state of a module whose first tensors are the inputs that leave."""
        return _KeptOnHost(self, name, call, with_graph=with_graph, num_inputs=num_inputs)

    def _make_lanes(self) -> Lanes:
        return CudaLanes(self._device)


class _KeptOnHost(KeptInput):
    """State of a module whose inputs wait on the host."""

    def __init__(
        self, offload: Offload, name: str, call: Call, *, with_graph: bool, num_inputs: int
    ) -> None:
        super().__init__(name, call, with_graph=with_graph)
        self._offload, self._num_inputs = offload, num_inputs
        self._waiting: Waiting

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        outputs, saved = super().forward(tensors)
        self._waiting = self._offload.push(saved[: self._num_inputs])
        return outputs, saved[self._num_inputs :]

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        if not flows:
            return None
        inputs = self._offload.fetch(self._waiting)
        return super().prepare([*inputs, *saved], needs, flows=flows)


def _copy_to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
