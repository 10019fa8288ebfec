"""Patch embedding: cut images into squares and map each to a token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Patches(nn.Module):
    """Patch embedding.

    Args:
        options: Options of a vision transformer.
        overlap: Whether squares have almost twice the patch size, and overlap, as in MViT.
    """

    def __init__(self, options: Any, *, overlap: bool = False) -> None:
        super().__init__()
        size = options.patch_size
        self.image_size, self.overlap = options.image_size, overlap
        kernel, padding = (2 * size - 1, size - 1) if overlap else (size, 0)
        self.conv = nn.Conv2d(
            options.in_channels, options.width, kernel, stride=size, padding=padding
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of a linear map of a square."""
        nn.init.xavier_uniform_(self.conv.weight.flatten(1))
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        channels, size = self.conv.in_channels, self.image_size
        if x.dim() != 4 or x.shape[1:] != (channels, size, size):
            raise ValueError(
                f"made for batches of images of {channels} x {size} x {size}, got {tuple(x.shape)}"
            )
        if self.overlap:
            maps: Tensor = self.conv(x)
            return maps.flatten(2).transpose(1, 2)
        tokens: Tensor = _PatchLinear.apply(x, self.conv.weight, self.conv.bias)  # type: ignore[no-untyped-call]
        return tokens


class _PatchLinear(torch.autograd.Function):
    """Convolution whose stride is its kernel size, computed as one matrix product.

    On a GPU that takes an eighth of the convolution's time. It saves the image, not the patches,
    which would be a copy of it. The backward cuts them again.
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(_cut(x, weight.shape[-1]), weight.flatten(1), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        size, dx, dw = weight.shape[-1], None, None
        if ctx.needs_input_grad[0]:
            dx = _join(dy @ weight.flatten(1).to(dy.dtype), x.shape, size)
        if ctx.needs_input_grad[1]:
            patches = _cut(x, size).to(dy.dtype)
            dw = (dy.flatten(0, 1).T @ patches.flatten(0, 1)).view_as(weight)
        return dx, dw, dy.sum((0, 1))


def _cut(x: Tensor, size: int) -> Tensor:
    """Cut images into patches: (batch, channels, height, width) to (batch, patches, pixels)."""
    batch, channels, height, width = x.shape
    cut = x.reshape(batch, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _join(patches: Tensor, shape: torch.Size, size: int) -> Tensor:
    """Invert `_cut`."""
    batch, channels, height, width = shape
    cut = patches.reshape(batch, height // size, width // size, channels, size, size)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(shape)
