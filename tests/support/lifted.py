"""The lift's recurrence under plain autograd, with gradients straight through the rounding."""

from typing import Any

import torch
from torch import Tensor

from redivider.backward.lifted import LiftedRow
from redivider.lift import draw_signs


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factors: list[Any], *sources: Tensor) -> Tensor:
        ctx.factors = factors
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *((grad * factor).to(grad.dtype) for factor in ctx.factors)


def through(value: Tensor, *terms: tuple[Any, Tensor]) -> Tensor:
    """Return a value whose gradient is that of a sum of factors times tensors."""
    factors, sources = [factor for factor, _ in terms], [source for _, source in terms]
    result: Any = _Through.apply(value, factors, *sources)
    return result


class Reference:
    """Streams of the recurrence, as 64-bit integers and as values with a graph."""

    def __init__(self, bits: int, grid: int = 20) -> None:
        self.bits, self.grid = bits, grid
        self.index = 0

    def run(self, block: Any, u: Tensor) -> Any:
        """Run the next block on the output of the last one, which is `u`."""
        if self.index == 0:
            self.n_u = self.n_x = self.steps(u)
            self.u = self.x = through(self.real(self.n_u, u), (1, u))
        else:
            sign = draw_signs(self.n_u).long()
            d, g = self.n_u - self.n_x, sign * 2.0**-self.bits
            self.n_x = self.n_u + sign * (d >> self.bits)
            self.x = through(self.real(self.n_x, u), (1 + g, self.u), (-g, self.x))
        result = block(self.x)
        hidden = result[0] if isinstance(result, tuple) else result
        wide = torch.promote_types(u.dtype, torch.float32)
        residual = hidden.to(wide) - self.x.to(wide)
        self.n_u = self.n_u + self.steps(residual)
        self.u = through(self.real(self.n_u, u), (1, self.u), (1, residual.to(u.dtype)))
        self.index += 1
        return (self.u, *result[1:]) if isinstance(result, tuple) else self.u

    def steps(self, x: Tensor) -> Tensor:
        wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
        return (wide * 2**self.grid).round().long()

    def real(self, n: Tensor, like: Tensor) -> Tensor:
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return (n.to(wide) * 2.0**-self.grid).to(like.dtype)


def follow(blocks: Any, bits: int, grid: int = 20) -> None:
    """Make a model's blocks run by the recurrence, in every pass of training."""
    state: dict[str, Reference] = {}
    for index, block in enumerate(blocks):
        plain = block.forward

        def forward(u: Tensor, *args: Any, index: int = index, plain: Any = plain, **kwargs: Any):
            if index == 0:
                state["now"] = Reference(bits, grid)
            return state["now"].run(lambda x: plain(x, *args, **kwargs), u)

        block.forward = forward


class Watched(LiftedRow):
    """A row that compares recovered streams with those of the forward."""

    num_compared = 0

    def run(self, *args: Any) -> Any:
        before = vars(self).setdefault("before", {})
        if self.next:
            before[self.next - 1] = tuple(stream.clone() for stream in self._stored)
        return super().run(*args)

    def undo(self, index: int, *args: Any) -> None:
        super().undo(index, *args)
        *recovered_streams, value = self._outputs[index - 1]
        assert torch.equal(value, self.steps.real(recovered_streams[1]))
        for recovered, stream in zip(
            recovered_streams, vars(self)["before"][index - 1], strict=True
        ):
            assert torch.equal(recovered, stream)
            Watched.num_compared += 1
