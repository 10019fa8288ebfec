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
        if not isinstance(head, nn.Linear):
            raise TypeError(f"head must be a torch.nn.Linear, got {type(head).__name__}")
        if chunk < 1:
            raise ValueError(f"chunk must be 1 or more tokens, got {chunk}")
        self.head = head
        self.chunk = chunk
        self.ignore_index = ignore_index

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of (..., width) against (...) words."""
        if x.shape[:-1] != targets.shape:
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
        )
        return loss

    def extra_repr(self) -> str:
        return f"chunk={self.chunk}"


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        ignore_index: int,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3]
        count = (targets != ignore_index).sum()
        head = [
            each if each is None else each.detach().requires_grad_(need)
            for each, need in zip((weight, bias), needs[1:], strict=True)
        ]
        # Sums of many chunks are made in float32 at least; a single product would be, too.
        sums = [
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
            if each is not None and each.requires_grad
            else None
            for each in head
        ]
        parts, total = [], x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        chunks = zip(torch.split(x.detach(), chunk), torch.split(targets, chunk), strict=True)
        for rows, wanted in chunks:
            leaf = rows.requires_grad_(needs[0])
            leaves = [each for each in (leaf, *head) if each is not None and each.requires_grad]
            with torch.set_grad_enabled(bool(leaves)):
                loss = _share(leaf, head, wanted, count, ignore_index)
            total += loss.detach()
            found = iter(torch.autograd.grad(loss, leaves)) if leaves else iter(())
            if needs[0]:
                parts.append(next(found))
            for each in sums:
                if each is not None:
                    each += next(found)
        gradients = [torch.cat(parts) if parts else None]
        gradients += [s if s is None else s.to(h) for s, h in zip(sums, head, strict=True)]
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True needs the graph of the logits, which was not kept; use "
                "F.cross_entropy for gradients of gradients"
            )
        return *(each if each is None else each * dloss for each in ctx.saved_tensors), *[None] * 3


def _share(
    x: Tensor, head: list[Tensor | None], targets: Tensor, count: Tensor, ignore_index: int
) -> Tensor:
    """What a chunk adds to the mean."""
    weight, bias = head
    assert weight is not None
    logits = F.linear(x, weight, bias)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum") / count
