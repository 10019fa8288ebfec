"""Checkpoints in host memory: what units keep waits there between forward and backward.

Copies run on a CUDA stream of their own (the side lane), beside the units:

    forward    main    F(0)    F(1)     F(2)     F(3)
               side            out(0)   out(1)   out(2)              to the host
    backward   main    B(3)    B(2)     B(1)     B(0)
               side    in(1)   in(0)                                 and back, one unit ahead

A unit keeps its inputs, and the outputs of operations that it saves (saving.py). Those of the last
NUM_LEAVING units stay on the device, too: the backward needs them first.
Where copies are slower than units, a unit waits until all but that many have left, so that memory
stays small. Tensors come back ahead of need only if the unit above has offloaded, too: else they
would wait on the device while other units run.

Memory of the side lane is reused by that lane alone, after a wait for all work of the main one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor

from redivider._torch_private import after_backward, backward_keeps_graph
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import KeptInput
from redivider.backward.overlap import MAIN, SIDE, CudaLanes, Lanes
from redivider.errors import ChangedError
from redivider.replay import Call
from redivider.replay.call import GraphRun
from redivider.strides import dense

NUM_LEAVING = 2  # units whose tensors may be on their way to the host


class Waiting:
    """Tensors that one unit keeps: on the host, on the device, or on their way.

    Args:
        tensors: The tensors on the device.
        host: Copies on the host.
        copied: Event after the copies.
        before: Tensors of the unit before.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        host: list[Tensor],
        copied: Any,
        before: "Waiting | None",
    ) -> None:
        self.copied, self.before = copied, before
        self.host: list[Tensor] | None = host
        self.device: list[Tensor] | None = [tensor.detach() for tensor in tensors]
        # The caller may write to them as long as they are not copies.
        self._versions = [tensor._version for tensor in self.device]

    def verify_unchanged(self) -> None:
        """Verify that tensors that never left are as they were."""
        if self.device is None or not self._versions:
            return
        if [tensor._version for tensor in self.device] != self._versions:
            raise ChangedError(
                "its input changed between the forward and the backward, which runs it again"
            )

    def bring(self, device: torch.device) -> None:
        """Copy the tensors to the device."""
        if self.host is None:
            raise RuntimeError(
                "its input was released by a backward before; that one needs retain_graph=True"
            )
        self.device = [
            torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
            for tensor in self.host
        ]
        self._versions = []


class Offload:
    """Tensors that wait on the host, of one forward pass and its backward.

    Args:
        device: Device of the units.
    """

    # By device and CUDA stream: tensors of the last units of all chains, which are still there.
    _leaving_by_stream: ClassVar[dict[Any, deque[Callable[[], Waiting | None]]]] = {}

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                'backward="offload" keeps inputs on the host, which a captured step cannot do; use '
                '"checkpoint" or "reverse"'
            )
        self._device = device
        self._lanes = self._make_lanes()
        self._leaving = self._get_leaving()
        self._last: ref[Waiting] | None = None
        self._has_gap = False  # whether a unit has run since, whose tensors do not leave
        self._ahead: Waiting | None = None  # in the backward: tensors that have come back too early

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor can wait on the host."""
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        return is_plain and tensor.device == self._device

    def push(self, tensors: Sequence[Tensor]) -> Waiting:
        """Send the tensors of the next unit to the host."""
        lanes = self._lanes
        lanes.wait(SIDE, lanes.mark(MAIN))
        with lanes.on(SIDE):
            host = [_copy_to_host(tensor) for tensor in tensors]
        before = None if self._last is None or self._has_gap else self._last()
        self._has_gap = False
        waiting = Waiting(tensors, host, lanes.mark(SIDE), before)
        self._last = ref(waiting)
        self._advance(self._last)
        return waiting

    def skip(self) -> None:
        """Note that a unit has run whose tensors do not wait on the host."""
        self._has_gap = True
        self._advance(lambda: None)

    def report_to(self, mailbox: Mailbox) -> None:
        """Do nothing: what returns from the host is exact."""

    def _advance(self, last: Callable[[], Waiting | None]) -> None:
        """Let go of what the last units before have sent."""
        self._leaving.append(last)
        while len(self._leaving) > NUM_LEAVING:
            left = self._leaving.popleft()()
            if left is not None and left.device is not None:
                self._lanes.wait(MAIN, left.copied)  # before its memory is used again
                left.device = None

    def fetch(self, waiting: Waiting) -> list[Tensor]:
        """Return tensors on the device, and begin to bring back those of the unit before."""
        waiting.verify_unchanged()
        if waiting.device is None:
            self._bring(waiting)
        self._lanes.wait(MAIN, waiting.copied)
        tensors, waiting.device = waiting.device, None
        if not backward_keeps_graph():
            waiting.host = None
        before, self._ahead = waiting.before, None
        if before is not None and before.device is None and before.host is not None:
            self._bring(before)
            self._ahead = before
            after_backward(self._end)
        assert tensors is not None
        return tensors

    def _bring(self, waiting: Waiting) -> None:
        lanes = self._lanes
        lanes.wait(SIDE, lanes.mark(MAIN))
        with lanes.on(SIDE):
            waiting.bring(self._device)
        waiting.copied = lanes.mark(SIDE)

    def _end(self) -> None:
        """Release what was prefetched but unused, as when only some gradients are needed."""
        if self._ahead is not None:
            self._ahead.device = None
            self._ahead = None

    def make_kept(self, name: str, call: Call, *, with_graph: bool, num_inputs: int) -> KeptInput:
        """Return the state of a module whose first tensors are the inputs that leave."""
        return _KeptOnHost(self, name, call, with_graph=with_graph, num_inputs=num_inputs)

    def _make_lanes(self) -> Lanes:
        return CudaLanes(self._device)

    def _get_leaving(self) -> deque[Callable[[], Waiting | None]]:
        if self._device.type != "cuda":
            return deque()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        return self._leaving_by_stream.setdefault((self._device, stream), deque())


class _KeptOnHost(KeptInput):
    """State of a module whose inputs, and outputs of saved operations, wait on the host."""

    def __init__(
        self, offload: Offload, name: str, call: Call, *, with_graph: bool, num_inputs: int
    ) -> None:
        super().__init__(name, call, with_graph=with_graph)
        self._offload, self._num_inputs = offload, num_inputs
        self._places: list[int] = []  # of the tensors that leave
        self._waiting: Waiting

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        has_backward = any(tensor.requires_grad for tensor in tensors)
        if has_backward:  # both runs get an input without gaps, as it comes back from the host
            inputs = [self._dense(tensor) for tensor in tensors[: self._num_inputs]]
            tensors = [*inputs, *tensors[self._num_inputs :]]
        outputs, saved = super().forward(tensors)
        if has_backward:
            # Between the two are other arguments, which units may share, and weights.
            places = [*range(self._num_inputs), *range(len(tensors), len(saved))]
            self._places = [place for place in places if self._offload.takes(saved[place])]
        if self._places:
            self._waiting = self._offload.push([saved[place] for place in self._places])
        left = set(self._places)
        return outputs, [tensor for place, tensor in enumerate(saved) if place not in left]

    def _dense(self, tensor: Tensor) -> Tensor:
        if not self._offload.takes(tensor):
            return tensor
        result: Tensor = dense(tensor)
        return result.requires_grad_() if tensor.requires_grad else result

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        if not flows:
            return None
        tensors = list(saved)
        if self._places:
            for place, tensor in zip(self._places, self._offload.fetch(self._waiting), strict=True):
                tensors.insert(place, tensor)
        return super().prepare(tensors, needs, flows=flows)


def _copy_to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
