"""A unit as one autograd node that keeps less than its graph.

Between forward and backward such a node keeps its input, or nothing, and in the backward it runs
its module again. Parameters are real inputs of the node and their gradients real outputs, so that
frozen stems, `torch.autograd.grad`, hooks, DDP and FSDP2 see what they see of a plain module.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from redivider.errors import ChangedError, UnitError, naming
from redivider.replay import Call, Record


class Kept(ABC):
    """What one unit keeps between its forward and its backward."""

    name: str
    """The unit's index and name, for errors."""

    @abstractmethod
    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Compute the outputs; return them and the tensors to save for the backward."""

    @abstractmethod
    def backward(
        self, saved: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Turn the outputs' gradients into those of the inputs; `needs` says which are wanted."""

    def apply(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the unit as a node of the caller's graph."""
        outputs: tuple[Tensor, ...] = _Node.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return outputs


class KeptInput(Kept):
    """A module that keeps its arguments, and is run again from them."""

    def __init__(self, name: str, call: Call, *, with_graph: bool) -> None:
        self.name = name
        self._call = call
        self._with_graph = with_graph
        self._record: Record
        self.spec: TreeSpec

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        output, self._record = self._call.first_run(tensors, with_graph=self._with_graph)
        outputs, self.spec = tree_flatten(output)
        if not all(isinstance(each, Tensor) for each in outputs):
            kind = type(self._call.module).__name__
            raise UnitError(f"{kind} must return tensors, got {type(output).__name__}")
        return outputs, tensors

    def backward(
        self, saved: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        if all(grad is None for grad in grads):
            return [None] * len(needs)
        return self._call.rerun(saved, needs, self._record).pull_back(grads)


def keep_input(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, exact: bool
) -> Any:
    """Run a module so that it keeps its arguments and no graph; `exact`: by equal kernels twice."""
    call, tensors = Call.split(module, args, kwargs)
    kept = KeptInput(name, call, with_graph=exact)
    return tree_unflatten(kept.apply(tensors), kept.spec)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = kept.forward(tensors)
        ctx.kept = kept
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.kept.name}: create_graph=True needs the graph that this unit did not keep; "
                'use backward="store" for gradients of gradients'
            )
        with naming(ctx.kept.name):
            return (None, *ctx.kept.backward(_saved(ctx), ctx.needs_input_grad[1:], grads))


def _saved(ctx: Any) -> Sequence[Tensor]:
    try:
        saved: Sequence[Tensor] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise ChangedError(
            "its weights, arguments or output changed between the forward and the backward, which "
            "runs it again and needs them as they were (step the optimizer after the backward): "
            f"{str(error).partition(' Hint:')[0]}"
        ) from None
    return saved
