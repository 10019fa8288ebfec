"""What goes on from one tick to the next: messages on their way, and gradients not yet applied."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from redivider.pipeline.stages.stage import Message

Inboxes: TypeAlias = list[dict[int, Message]]


@dataclass
class Carried:
    """Messages by stage and micro-batch, gradients by parameter, and the norms of stages'."""

    up: Inboxes
    down: Inboxes
    grads: dict[Tensor, Tensor | None]
    norms: list[Tensor]

    @classmethod
    def of(cls, pipe: Any) -> "Carried":
        """What a pipeline holds now: the same tensors in dictionaries of its own."""
        parameters = [each for stage in pipe.stages for each in stage.module.parameters()]
        up, down = ([dict(inbox) for inbox in inboxes] for inboxes in (pipe._up, pipe._down))
        norms = [stage.norm for stage in pipe.stages]
        return cls(up, down, {each: each.grad for each in parameters}, norms)

    def cloned(self, shift: int = 0) -> "Carried":
        """The same in memory of its own, of micro-batches that lie so many further on."""
        up, down = (
            [{n + shift: each.cloned(n + shift) for n, each in inbox.items()} for inbox in inboxes]
            for inboxes in (self.up, self.down)
        )
        grads = {p: None if grad is None else grad.clone() for p, grad in self.grads.items()}
        return Carried(up, down, grads, [norm.clone() for norm in self.norms])

    def give_to(self, pipe: Any) -> None:
        """Let a pipeline go on from here."""
        pipe._up, pipe._down = ([dict(inbox) for inbox in each] for each in (self.up, self.down))
        for parameter, grad in self.grads.items():
            parameter.grad = grad
        for stage, norm in zip(pipe.stages, self.norms, strict=True):
            stage.norm = norm

    def copy_to(self, other: "Carried") -> None:
        """Copy all tensors to where another's lie; some may lie there, and must be read first."""
        sources, targets = self._tensors(), other._tensors()
        taken = {each.untyped_storage().data_ptr() for each in targets}
        safe = [
            each.clone() if each.untyped_storage().data_ptr() in taken else each for each in sources
        ]
        by_look: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(targets, safe, strict=True):
            look = (target.dtype, source.dtype, target.stride() == source.stride())
            some = by_look.setdefault(look, ([], []))
            some[0].append(target)
            some[1].append(source)
        for some in by_look.values():  # each in a kernel or a few
            torch._foreach_copy_(*some)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(each.nbytes for each in self._tensors())

    def _tensors(self) -> list[Tensor]:
        """In an order that does not change from tick to tick."""
        trees = [
            (each.flow.value, each.side, each.target, each.grads)
            for inbox in (*self.up, *self.down)
            for _, each in sorted(inbox.items())
        ]
        leaves = tree_leaves((trees, list(self.grads.values()), self.norms))
        return [each for each in leaves if isinstance(each, Tensor)]
