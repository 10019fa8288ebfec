"""Cross-entropy without the logits: a language model's head and its loss, a chunk at a time.

The logits of 8 sequences of 1,024 tokens over 50,000 words take 1.5 GiB, their softmax and its
gradient as much again. Here the head is part of the loss: the forward takes one chunk of tokens
after the other, computes its logits, loss and gradients, adds them up, and lets the logits go. The
backward only scales what is there. No work is done twice, and what is kept is as large as the
gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider.replay.autocast import is_autocast_enabled


class ChunkedCrossEntropy(nn.Module):
    """The mean cross-entropy of a linear head: equal to `F.cross_entropy(head(x), targets)`.

        body, loss = model[:-1], rd.ChunkedCrossEntropy(model[-1])
        loss(body(tokens), targets).backward()

    It trains the weights of the head that it is given, so the whole model stays usable. As the loss
    of a pipeline it belongs to the last stage: `rd.Pipeline(body, loss=loss, ...)`.

    Args:
        head: What makes logits of the model's output.
        chunk: The number of tokens whose logits exist at one time.
        ignore_index: The target of tokens that do not count.
    """

    def __init__(self, head: nn.Linear, *, chunk: int = 1024, ignore_index: int = -100) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(
                f"head must be a torch.nn.Linear that computes what it does, got "
                f"{type(head).__name__}; use F.cross_entropy for others"
            )
        if not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk must be a number of tokens, 1 or more, got {chunk}")
        self.head = head
        self.chunk = chunk
        self.ignore_index = ignore_index

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of (..., width) against (...) words."""
        if self.head._forward_hooks or self.head._forward_pre_hooks:
            raise RuntimeError(
                "the head has hooks (weight_norm and spectral_norm of torch.nn.utils are such), "
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
            torch.is_grad_enabled(),  # which it is not inside
        )
        return loss

    def extra_repr(self) -> str:
        return f"chunk={self.chunk}"


class _Chunked(torch.autograd.Function):
    """Keeps the gradients of the sum of all losses, not yet divided by their number.

    Those of the mean are so much smaller that float16 would lose them before a GradScaler's factor
    comes, in the backward.
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
            each if each is None else each.detach().requires_grad_(need)
            for each, need in zip((weight, bias), needs[1:], strict=True)
        ]
        sums = [
            torch.zeros_like(each, dtype=_wide(each.dtype))
            if each is not None and each.requires_grad
            else None
            for each in head
        ]
        parts, total = [], x.new_zeros((), dtype=_wide(x.dtype))
        casted = _cast(head)
        chunks = zip(torch.split(x.detach(), chunk), torch.split(targets, chunk), strict=True)
        for rows, wanted in chunks:
            leaf = rows.requires_grad_(needs[0])
            leaves = [each for each in (leaf, *head) if each is not None and each.requires_grad]
            with torch.set_grad_enabled(bool(leaves)):
                loss = _sum_losses(leaf, casted, wanted, ignore_index)
            total += loss.detach()
            found = iter(torch.autograd.grad(loss, leaves)) if leaves else iter(())
            if needs[0]:
                parts.append(next(found))
            for each in sums:
                if each is not None:
                    each += next(found)
        count = (targets != ignore_index).sum()
        ctx.dtypes = [each if each is None else each.dtype for each in (x, weight, bias)]
        ctx.save_for_backward(torch.cat(parts) if parts else None, *sums, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True needs the graph of the logits, which was not kept; use "
                "F.cross_entropy for gradients of gradients"
            )
        *gradients, count = ctx.saved_tensors
        scale = dloss / count.clamp(min=1)
        scaled = [
            None if each is None else (each * scale).to(dtype)
            for each, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, *[None] * 4


def _sum_losses(x: Tensor, head: list[Tensor | None], targets: Tensor, ignore_index: int) -> Tensor:
    weight, bias = head
    assert weight is not None
    logits = F.linear(x, weight, bias)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def _cast(head: list[Tensor | None]) -> list[Tensor | None]:
    """As autocast would, once for all chunks, and without leaving casts of leaves in its cache."""
    device = next(each for each in head if each is not None).device
    if not is_autocast_enabled(device):
        return head
    dtype = torch.get_autocast_dtype(device.type)
    with torch.enable_grad():
        return [
            each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in head
        ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A sum of many chunks is made in float32 at least, as a single product is."""
    return torch.promote_types(dtype, torch.float32)
