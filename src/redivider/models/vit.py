"""ViT and Rev-ViT: images as rows of patches.

Dosovitskiy et al. 2021 in timm's form (pre-norm, class token), and Mangalam et al. 2022: the stem
goes into both streams, F (attention) and G (MLP) have no skip inside, and the head reads the
averages of both streams side by side. A layer is two units, attention and MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate
from redivider.models.options import Images, Layers, OptionError, verify_positive
from redivider.models.parts import (
    Linear,
    Pool,
    Positions,
    Residual,
    Units,
    named,
    transformer_layers,
)

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3},
    "small": {"width": 384, "depth": 12, "heads": 6},
    "base": {"width": 768, "depth": 12, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "patch_size": 14},
    "giant": {"width": 1408, "depth": 40, "heads": 16, "patch_size": 14, "hidden": 6144},
}

Norm = partial(nn.LayerNorm, eps=1e-6)


@dataclass(frozen=True, kw_only=True)
class Options(Images, Layers):
    """Of ViT and Rev-ViT."""

    patch_size: int = 16

    def __post_init__(self) -> None:
        Images.__post_init__(self)
        Layers.__post_init__(self)
        verify_positive(self, "patch_size")
        if self.image_size % self.patch_size:
            raise OptionError(
                f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}: "
                "patches must cover the image"
            )

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """The residual functions in order, with the names of their units."""
        return transformer_layers(self, Norm, mlp_dropout=self.dropout)


class Patches(nn.Module):
    """Cuts an image into patches, and maps each to a token; `conv` only holds the weights."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        size = options.patch_size
        self.image_size = options.image_size
        self.conv = nn.Conv2d(options.in_channels, options.width, size, stride=size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As a linear map of the patch."""
        nn.init.xavier_uniform_(self.conv.weight.flatten(1))
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        size = self.image_size
        channels = self.conv.in_channels
        if x.dim() != 4 or x.shape[1:] != (channels, size, size):
            raise ValueError(
                f"made for batches of images of {channels} x {size} x {size}, got {tuple(x.shape)}"
            )
        y: Tensor = _CutAndMap.apply(x, self.conv.weight, self.conv.bias)  # type: ignore[no-untyped-call]
        return y


class _CutAndMap(torch.autograd.Function):
    """A convolution whose stride is its size, as one product of the patches in order.

    On a GPU that takes an eighth of the convolution's time. It saves the image and not the patches,
    which would be a copy of it.
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
    """The patches of images, each as one vector."""
    batch, channels, height, width = x.shape
    cut = x.reshape(batch, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _join(patches: Tensor, shape: torch.Size, size: int) -> Tensor:
    """The inverse of `_cut`."""
    batch, channels, height, width = shape
    cut = patches.reshape(batch, height // size, width // size, channels, size, size)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(shape)


class ClassToken(nn.Module):
    """Puts a learned token before the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nearly nothing."""
        nn.init.normal_(self.weight, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.weight.expand(len(x), 1, -1).to(x), x), dim=1)


class First(nn.Module):
    """The first token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def vit(options: Options) -> Units:
    """The units of a ViT: stem, two for each layer, head."""
    stem = named(
        patches=Patches(options),
        token=ClassToken(options.width),
        positions=Positions(options.num_patches + 1, options.width),
        dropout=nn.Dropout(options.dropout),
    )
    layers = {name: Residual(f) for name, f in options.functions()}
    head = named(
        norm=Norm(options.width),
        pool=First(),
        classes=Linear(options.width, options.num_classes, std=0.02),
    )
    return {"stem": stem, **layers, "head": head}


def rev_vit(options: Options) -> Units:
    """The units of a Rev-ViT: stem, two for each layer, head."""
    stem = named(
        patches=Patches(options),
        positions=Positions(options.num_patches, options.width),
        dropout=nn.Dropout(options.dropout),
        streams=Duplicate(),
    )
    layers = {name: Coupling(f) for name, f in options.functions()}
    head = named(
        pool=Pool(1),
        norm=Norm(2 * options.width),
        classes=Linear(2 * options.width, options.num_classes, std=0.02),
    )
    return {"stem": stem, **layers, "head": head}
