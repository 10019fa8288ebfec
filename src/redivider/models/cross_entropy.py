"""Cross-entropy without the full logits: head and loss of a language model, chunk by chunk.

The logits of 8 sequences of 1,024 tokens over 50,000 words take 1.5 GiB, their softmax and its
gradient as much again. Here the head is part of the loss. For one chunk of tokens after the other,
the forward computes logits, loss and gradients, accumulates the last two, and frees the logits. The
backward only scales the gradients. Nothing is recomputed, and the memory kept is that of the
gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider._torch_private import has_forward_hooks
from redivider.replay.autocast import is_autocast_enabled


class ChunkedCrossEntropy(nn.Module):
    """Mean cross-entropy of a linear head, equal to `F.cross_entropy(head(x), targets)`.

        body, loss = model[:-1], rd.ChunkedCrossEntropy(model[-1])
        loss(body(tokens), targets).backward()

    It trains the weights of `head` itself, so the whole model stays usable. As the loss of a
    pipeline it belongs to the last stage: `rd.Pipeline(body, loss=loss, ...)`.

    Args:
        head: Linear map from the model's output to logits.
        chunk: Number of tokens whose logits exist at one time.
        ignore_index: Target of tokens that the mean leaves out.
    """

    def __init__(self, head: nn.Linear, *, chunk: int = 1024, ignore_index: int = -100) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(
                f"head must be a torch.nn.Linear whose forward is not overridden, got "
                f"{type(head).__name__}; use F.cross_entropy for other heads"
            )
        if not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk must be a number of tokens, 1 or more, got {chunk}")
        self.head = head
        self.chunk = chunk
        self.ignore_index = ignore_index

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of features of shape (..., width) against targets of shape (...)."""
        if has_forward_hooks(self.head):
            raise RuntimeError(
                "the head has hooks (weight_norm and spectral_norm of torch.nn.utils add them), "
                "which would not be called; use F.cross_entropy, or torch.nn.utils.parametrizations"
            )
        if x.dim() < 2 or x.shape[:-1] != targets.shape:
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} do not fit tokens of shape "
                f"{tuple(x.shape[:-1])}, the model's output without its last dimension"
            )
        loss: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2),
            self.head.weight,
            self.head.bias,
            targets.flatten(),
            self.chunk,
            self.ignore_index,
            torch.is_grad_enabled(),  # always off inside a Function
        )
        return loss

    def extra_repr(self) -> str:
        return f"chunk={self.chunk}"


class _Chunked(torch.autograd.Function):
    """Head and loss in one; keeps the gradients of the summed loss until the backward.

    Gradients of the mean are much smaller: in float16 they would underflow before the backward
    multiplies them by the scale of a GradScaler. So the backward divides by the count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        ignore_index: int,
        with_grad: bool,
    ) -> Tensor:
        needs = [need and with_grad for need in ctx.needs_input_grad[:3]]
        head = [
            param if param is None else param.detach().requires_grad_(need)
            for param, need in zip((weight, bias), needs[1:], strict=True)
        ]
        head_grads = [
            torch.zeros_like(param, dtype=_at_least_float32(param.dtype))
            if param is not None and param.requires_grad
            else None
            for param in head
        ]
        x_grads, total = [], x.new_zeros((), dtype=_at_least_float32(x.dtype))
        cast_head = _autocast(head)
        chunks = zip(torch.split(x.detach(), chunk), torch.split(targets, chunk), strict=True)
        for chunk_x, chunk_targets in chunks:
            chunk_x.requires_grad_(needs[0])
            leaves = [leaf for leaf in (chunk_x, *head) if leaf is not None and leaf.requires_grad]
            with torch.set_grad_enabled(bool(leaves)):
                loss = _sum_losses(chunk_x, cast_head, chunk_targets, ignore_index)
            total += loss.detach()
            grads = iter(torch.autograd.grad(loss, leaves)) if leaves else iter(())
            if needs[0]:
                x_grads.append(next(grads))
            for head_grad in head_grads:
                if head_grad is not None:
                    head_grad += next(grads)
        count = (targets != ignore_index).sum()
        ctx.dtypes = [tensor if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        ctx.save_for_backward(torch.cat(x_grads) if x_grads else None, *head_grads, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True needs the graph of the logits, which was not kept; use "
                "F.cross_entropy for gradients of gradients"
            )
        *grads, count = ctx.saved_tensors
        scale = dloss / count.clamp(min=1)
        scaled = [
            None if grad is None else (grad * scale).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *scaled, *[None] * 4  # targets, chunk, ignore_index, with_grad


def _sum_losses(x: Tensor, head: list[Tensor | None], targets: Tensor, ignore_index: int) -> Tensor:
    weight, bias = head
    assert weight is not None
    logits = F.linear(x, weight, bias)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def _autocast(head: list[Tensor | None]) -> list[Tensor | None]:
    """Cast the head as autocast does: once for all chunks, and without filling its cache."""
    device = next(param for param in head if param is not None).device
    if not is_autocast_enabled(device):
        return head
    dtype = torch.get_autocast_dtype(device.type)
    with torch.enable_grad():
        return [
            param if param is None or param.dtype == torch.float64 else param.to(dtype)
            for param in head
        ]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum over chunks; a single product accumulates so as well."""
    return torch.promote_types(dtype, torch.float32)
