"""Gradients of weights, summed over micro-batches until an update."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redivider.errors import UnitError


def may_need(each: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return each.is_floating_point() or each.is_complex()


def widen(wide: list[Tensor], narrow: list[Tensor]) -> None:
    """Copy gradients of weights that were cast to tensors of as many bits as the weights have."""
    torch._foreach_copy_(wide, narrow)


def accumulate(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    widen: Callable[[list[Tensor], list[Tensor]], None] = widen,
    others: Sequence[Tensor | None] = (),
) -> None:
    """Add to the parameters' gradients, taking over a tensor only if no one else has it.

    `others` are gradients that go elsewhere; autograd may give one tensor to several. What was
    frozen since its forward gets none.
    """
    pairs = [
        (each, grad)
        for each, grad in zip(parameters, grads, strict=True)
        if grad is not None and each.requires_grad
    ]
    if any(grad.layout is not torch.strided for _, grad in pairs):
        raise UnitError("a gradient is sparse, which pipelines cannot sum; give sparse=False")
    narrow = [(each, grad) for each, grad in pairs if grad.dtype != each.dtype]
    wide = {each: torch.empty_like(each, requires_grad=False) for each, _ in narrow}
    if narrow:
        widen(list(wide.values()), [grad for _, grad in narrow])
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    taken_over = {each.untyped_storage().data_ptr() for each in others if each is not None}
    for parameter, grad in pairs:
        grad = wide.get(parameter, grad)
        if parameter.grad is not None:
            sums.append(parameter.grad)
            addends.append(grad)
            continue
        storage = grad.untyped_storage()
        whole = storage.nbytes() == grad.nbytes and storage.data_ptr() not in taken_over
        taken_over.add(storage.data_ptr())
        parameter.grad = grad if whole else grad.clone()
    if sums:
        torch._foreach_add_(sums, addends)
