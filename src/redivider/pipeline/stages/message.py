"""Values that move through a pipeline: a `Flow` between units, a `Message` between stages."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from redivider.arithmetic import Arithmetic
from redivider.pipeline.stages.compression import Packing
from redivider.replay.autocast import Autocast
from redivider.strides import dense
from redivider.tree import map_tensors


@dataclass
class Flow:
    """Value between two units: any structure of tensors, or two streams in stored form."""

    value: Any
    dtype: torch.dtype | None = None
    """Real dtype of streams in stored form; None for any other value."""

    def real(self, arithmetic: Arithmetic) -> Any:
        """Return the value as modules take it: streams in their real form."""
        if self.dtype is None:
            return self.value
        return tuple(arithmetic.real(stream, self.dtype) for stream in self.value)


@dataclass
class Message:
    """Flow of a micro-batch between stages: with its target upwards, with gradients downwards."""

    microbatch: int
    flow: Flow
    autocast: Autocast
    side: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    grads: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flow = Flow(dense(self.flow.value), self.flow.dtype)
        self.grads = [grad if grad is None else dense(grad) for grad in self.grads]

    @property
    def contents(self) -> tuple[Any, ...]:
        """Everything in it that holds tensors."""
        return self.flow.value, self.side, self.target, self.grads

    def cloned(self, microbatch: int) -> "Message":
        """Clone all tensors, for another micro-batch."""
        return self.mapped(Tensor.clone, microbatch)

    def mapped(self, function: Callable[[Tensor], Tensor], microbatch: int) -> "Message":
        """Return a message of the same form, for another micro-batch."""
        value, side, target, grads = map_tensors(function, self.contents)
        flow = Flow(value, self.flow.dtype)
        return Message(microbatch, flow, self.autocast, side, target, grads)

    def rounded(self, packing: Packing) -> "Message":
        """Return what arrives at the next stage after packing."""
        if packing.dtype is None:
            return self
        flow = Flow(packing.rounded(self.flow.value), self.flow.dtype)
        return replace(self, flow=flow, grads=packing.rounded(self.grads))

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors, without what is saved once per micro-batch."""
        return {
            "microbatch": self.microbatch,
            "value": self.flow.value,
            "dtype": self.flow.dtype,
            "grads": self.grads,
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], autocast: Autocast, side: dict[str, Any], target: Any
    ) -> "Message":
        """Build a message from a state."""
        flow = Flow(state["value"], state["dtype"])
        return cls(state["microbatch"], flow, autocast, side, target, state["grads"])
