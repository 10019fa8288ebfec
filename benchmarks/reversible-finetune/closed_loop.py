"""The rival of the lift: checkpoints that a closed loop compresses to a few bits a value.

    forward     q = round((x - y) / s);  y' = y + s q
    backward    y = y' - s q

x is the input of a block, y what is known of it. The forward is the plain network; in the backward
a block is run again at y' instead of x. The loop is closed: an error of one code is in the next
difference, so errors do not add up. Kept are q, packed, one scale a sample and block, and y of the
last block.
"""

from typing import Any

import torch
from torch import Tensor, nn

from redivider.lift import pack, unpack

# Steps of a normal distribution's best uniform quantizer, in standard deviations, by bits.
STEPS = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.335, 5: 0.188, 6: 0.104, 7: 0.057, 8: 0.031}


class ClosedLoop:
    """Streams of one forward pass and its backward."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.y: Tensor | None = None

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of the next input and its scales."""
        known = torch.zeros_like(x, dtype=torch.float32) if self.y is None else self.y
        distance = x.detach().float() - known
        spread = distance.flatten(1).square().mean(1).sqrt().clamp(min=1e-20)
        scale = (spread * STEPS[self.bits]).view(-1, *[1] * (x.ndim - 1))
        levels = 2**self.bits
        code = (distance / scale + levels / 2).floor().clamp(0, levels - 1)
        self.y = known + scale * (code + (1 - levels) / 2)
        return pack(code.to(torch.uint8), self.bits), scale

    def decode(self, y: Tensor, code: Tensor, scale: Tensor) -> Tensor:
        """Return what was known before an input was encoded."""
        values = unpack(code, self.bits, y.shape)
        known: Tensor = y - scale * (values + (1 - 2**self.bits) / 2)
        return known


class _Run(torch.autograd.Function):
    """A block that is run again at what is known of its input."""

    @staticmethod
    def forward(ctx: Any, loop: ClosedLoop, block: nn.Module, is_first: bool, x: Tensor) -> Tensor:
        ctx.loop, ctx.block, ctx.dtype, ctx.is_first = loop, block, x.dtype, is_first
        if is_first:  # kept as it is, as the lift does
            loop.y = x.detach().float()
            code = scale = x.new_empty(0)
        else:
            code, scale = loop.encode(x)
        ctx.save_for_backward(code, scale)
        ctx.random = torch.get_rng_state(), torch.cuda.get_rng_state() if x.is_cuda else None
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        with torch.no_grad():
            output = block(x)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        loop, (code, scale) = ctx.loop, ctx.saved_tensors
        known = loop.y
        x = known.to(ctx.dtype).requires_grad_()
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.set_rng_state(ctx.random[0])
            if x.is_cuda:
                torch.cuda.set_rng_state(ctx.random[1])
            with torch.autocast(x.device.type, torch.bfloat16, enabled=ctx.autocast):
                output = ctx.block(x)
            output = output[0] if isinstance(output, tuple) else output
            output.backward(grad)
        if not ctx.is_first:
            loop.y = loop.decode(known, code, scale)
        return None, None, None, x.grad


class LoopedBlock(nn.Module):
    """A block in its place of a closed loop."""

    def __init__(self, block: nn.Module, index: int, state: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.index, self._state = block, index, state

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return self.block(x, *args, **kwargs)
        if self.index == 0:
            self._state["loop"] = ClosedLoop(self._state["bits"])
        run: Any = _Run.apply
        return run(self._state["loop"], self.block, self.index == 0, x)


def close_loop(blocks: nn.ModuleList, bits: int) -> None:
    """Train a list of blocks by compressed checkpoints, in place; for blocks of one argument."""
    state: dict[str, Any] = {"bits": bits}
    for index, block in enumerate(list(blocks)):
        blocks[index] = LoopedBlock(block, index, state)
