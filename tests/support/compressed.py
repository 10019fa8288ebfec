"""Gradients of blocks at quantized inputs, under plain autograd and with all inputs kept."""

import math
from typing import Any

import torch
from torch import Tensor

from redivider.backward.quantizer import STEPS
from redivider.backward.tape import Tape


class _Instead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def instead(value: Tensor, source: Tensor) -> Any:
    """Return a value whose gradient goes to another tensor."""
    return _Instead.apply(value, source)


def approach(x: Tensor, y: Tensor, bits: int) -> Tensor:
    """Return `y`, moved by the closest of 2^bits levels around 0, the upper of two, row by row.

    Levels are a power of 2^(1/3) apart. Of a row of 384 values the largest difference is rounded to
    as many steps as it has, of one of 768 or more the largest two.
    """
    order = sorted(range(x.dim()), key=lambda dim: -x.stride()[dim])
    back = [order.index(dim) for dim in range(x.dim())]
    x, y = x.permute(order), y.permute(order)  # as in memory
    length = 1
    for size in reversed(x.shape[1:]):
        length *= size if length < 64 else 1
    together = [num for num in range(1, x.shape[0] + 1) if x.shape[0] % num == 0]
    enough = [num for num in together if num * length >= 64]
    length *= enough[0] if enough else x.shape[0]
    rows = []
    for row_x, row_y in zip(x.reshape(-1, length), y.reshape(-1, length), strict=True):
        distance = row_x.to(y.dtype) - row_y
        sizes = distance.abs().tolist()
        apart = sorted(range(length), key=lambda place: -sizes[place])[: min(2, length // 384)]
        largest = distance[apart]
        distance[apart] = 0
        step = STEPS[bits] * float(distance.square().mean().sqrt())
        most = 2 ** (31 - math.ceil(math.log2(length))) if apart else 1
        step = max(step, *(abs(float(size)) / (0.85 * most) for size in largest), 0.0)
        step = 2 ** (math.floor(3 * math.log2(step) + 0.5) / 3) if step else 0.0
        levels = step * (torch.arange(2**bits, dtype=y.dtype) - (2**bits - 1) / 2).flip(0)
        moves = levels[(distance[:, None] - levels).abs().argmin(1)]
        if step:
            moves[apart] = (largest / step + 0.5).floor() * step
        rows.append(row_y + moves)
    return torch.stack(rows).view(y.shape).permute(back)


class Reference:
    """Quantized inputs of one forward pass."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.y: Tensor | None = None

    def run(self, block: Any, x: Tensor) -> Any:
        """Run a block at its input, and take its gradients at what is known of it."""
        exact = x.detach()
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.y is None or self.y.shape != x.shape:
            self.y = exact.to(wide)
        else:
            self.y = approach(exact, self.y, self.bits)
        state = torch.get_rng_state()
        with torch.no_grad():
            values = block(exact)
        torch.set_rng_state(state)
        outputs = block(instead(self.y.to(x.dtype), x))
        if not isinstance(values, tuple):
            return instead(values, outputs)
        pairs = zip(values, outputs, strict=True)
        return tuple(instead(v, out) if isinstance(v, Tensor) else v for v, out in pairs)


def follow(blocks: Any, bits: int) -> None:
    """Make blocks run by the reference, in every pass of training."""
    state: dict[str, Reference] = {}
    for index, block in enumerate(blocks):
        plain, parameters = block.forward, list(block.parameters())

        def forward(
            x: Tensor,
            *args: Any,
            index: Any = index,
            plain: Any = plain,
            params: Any = parameters,
            **kwargs: Any,
        ):
            if not any(tensor.requires_grad for tensor in (x, *params)):
                return plain(x, *args, **kwargs)
            if index == 0 or x.grad_fn is None or not state:
                state["now"] = Reference(bits)
            return state["now"].run(lambda y: plain(y, *args, **kwargs), x)

        block.forward = forward


class Watched(Tape):
    """A tape that compares what it reads with what it knew in the forward."""

    num_compared = 0

    def append(self, x: Tensor) -> int:
        position = super().append(x)
        vars(self).setdefault("known", {})[position] = self._y.clone()
        return position

    def read(self, position: int) -> Tensor:
        value = super().read(position)
        known = vars(self)["known"][position]
        error = (self._y - known).abs().max() / known.abs().max().clamp(min=1e-30)
        assert error <= 16 * torch.finfo(known.dtype).eps, float(error)
        assert torch.equal(value.permute(self._order), self._y.to(value.dtype))
        Watched.num_compared += 1
        return value
