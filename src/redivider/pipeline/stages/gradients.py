"""Gradients of weights, summed over micro-batches until an update."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redivider.errors import UnitError


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether a tensor can have a gradient, by its dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def widen(wide: list[Tensor], narrow: list[Tensor]) -> None:
    """Copy gradients of cast weights to tensors in the weights' own precision."""
    torch._foreach_copy_(wide, narrow)


def accumulate(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    widen: Callable[[list[Tensor], list[Tensor]], None] = widen,
    others: Sequence[Tensor | None] = (),
) -> None:
    """Add to the gradients of the parameters that still require one.

    A first gradient becomes `parameter.grad` itself, unless its memory is used elsewhere: then it
    is cloned.

    Args:
        parameters: The parameters. One that was frozen since its forward gets no gradient.
        grads: Their gradients; None for no gradient.
        widen: Function that copies gradients to the precision of their weights.
        others: Gradients that go elsewhere. Autograd may return one tensor for several inputs.
    """
    pairs = [
        (parameter, grad)
        for parameter, grad in zip(parameters, grads, strict=True)
        if grad is not None and parameter.requires_grad
    ]
    if any(grad.layout is not torch.strided for _, grad in pairs):
        raise UnitError("a gradient is sparse, which pipelines cannot sum; give sparse=False")
    narrow = [(parameter, grad) for parameter, grad in pairs if grad.dtype != parameter.dtype]
    wide = {param: torch.empty_like(param, requires_grad=False) for param, _ in narrow}
    if narrow:
        widen(list(wide.values()), [grad for _, grad in narrow])
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    used_storages = {grad.untyped_storage().data_ptr() for grad in others if grad is not None}
    for parameter, grad in pairs:
        grad = wide.get(parameter, grad)
        if parameter.grad is not None:
            sums.append(parameter.grad)
            addends.append(grad)
            continue
        storage = grad.untyped_storage()
        # A view would keep the whole storage alive.
        is_whole = storage.nbytes() == grad.nbytes
        is_unused = storage.data_ptr() not in used_storages
        used_storages.add(storage.data_ptr())
        parameter.grad = grad if is_whole and is_unused else grad.clone()
    if sums:
        torch._foreach_add_(sums, addends)
