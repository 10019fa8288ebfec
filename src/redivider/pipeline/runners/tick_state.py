"""State that one tick leaves to the next: messages in flight and gradients not yet applied."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redivider.pipeline.runners.in_flight import Inboxes
from redivider.tree import storages_of, tensors_of

if TYPE_CHECKING:
    from redivider.pipeline.pipeline import Pipeline


@dataclass
class TickState:
    """Messages by stage and micro-batch, gradients by parameter, and each stage's gradient norm.

    Messages that come from outside of the process are no part of it.
    """

    up: Inboxes
    down: Inboxes
    grads: dict[Tensor, Tensor | None]
    norms: list[Tensor]

    @classmethod
    def of(cls, pipe: "Pipeline") -> "TickState":
        """Return a pipeline's current state: its own tensors, in new dictionaries."""
        params = [param for stage in pipe.stages for param in stage.module.parameters()]
        sources, flight = pipe.transport.sources, pipe.in_flight
        up = [{} if ("up", j) in sources else dict(box) for j, box in enumerate(flight.up)]
        down = [{} if ("down", j) in sources else dict(box) for j, box in enumerate(flight.down)]
        norms = [stage.norm for stage in pipe.stages]
        return cls(up, down, {param: param.grad for param in params}, norms)

    def clone(self, shift: int = 0) -> "TickState":
        """Clone all tensors and add `shift` to every micro-batch index."""
        up, down = (
            [
                {n + shift: message.cloned(n + shift) for n, message in box.items()}
                for box in inboxes
            ]
            for inboxes in (self.up, self.down)
        )
        grads = {p: None if grad is None else grad.clone() for p, grad in self.grads.items()}
        return TickState(up, down, grads, [norm.clone() for norm in self.norms])

    def restore_to(self, pipe: "Pipeline") -> None:
        """Make a pipeline resume from this state."""
        sources, flight = pipe.transport.sources, pipe.in_flight
        for direction, boxes in (("up", self.up), ("down", self.down)):
            inboxes = flight.up if direction == "up" else flight.down
            for j, box in enumerate(boxes):
                if (direction, j) not in sources:
                    inboxes[j] = dict(box)
        for param, grad in self.grads.items():
            param.grad = grad
        for stage, norm in zip(pipe.stages, self.norms, strict=True):
            stage.norm = norm

    def copy_to(self, other: "TickState") -> None:
        """Copy all tensors into the memory of another state.

        The two may share memory: the copy of one tensor may overwrite another one, which stays in
        flight. So such a tensor is cloned before anything is written.
        """
        sources, targets = self._tensors(), other._tensors()
        overwritten = {storage.data_ptr() for storage in storages_of(targets)}
        sources = [
            source.clone() if source.untyped_storage().data_ptr() in overwritten else source
            for source in sources
        ]
        # Group pairs that are alike: torch copies such a group in one kernel or a few.
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            kind = (target.dtype, source.dtype, target.stride() == source.stride())
            group = groups.setdefault(kind, ([], []))
            group[0].append(target)
            group[1].append(source)
        for group in groups.values():
            torch._foreach_copy_(*group)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        """Return all tensors, in an order that does not change from tick to tick."""
        trees = [
            message.contents
            for inbox in (*self.up, *self.down)
            for _, message in sorted(inbox.items())
        ]
        return tensors_of((trees, list(self.grads.values()), self.norms))
