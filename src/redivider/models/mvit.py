"""MViT and Rev-MViT: attention with pooled keys and values, and queries pooled between stages.

MViT is that of Fan et al. 2021 for images, with a class token. Attention widens the channels, as in
Li et al. 2022 and in Rev-MViT. Rev-MViT is that of Mangalam et al. 2022. Layers that keep the shape
are couplings, with the pooling inside of F. The first layer of a later stage is two junctions: they
fuse the streams, attend with pooled queries, and feed the result to both streams. There is no class
token; the head reads the means of both streams, concatenated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate
from redivider.models.attention import attend
from redivider.models.hierarchy import STD, Hierarchy, Stage, fusion
from redivider.models.options import verify_positive
from redivider.models.parts import (
    ClassToken,
    DropPath,
    First,
    Linear,
    Mean,
    Norm,
    Positions,
    Residual,
    Units,
    mlp,
    named,
    residual,
)
from redivider.models.patches import Patches

SIZES: dict[str, dict[str, Any]] = {
    "base": {"width": 96, "depths": (1, 2, 11, 2), "heads": 1},
}


@dataclass(frozen=True, kw_only=True)
class Options(Hierarchy):
    """Options of MViT and Rev-MViT."""

    pool: int = 4
    """Stride with which the first stage pools keys and values; later ones halve it, down to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        verify_positive(self, "pool")

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the first stage, without the class token."""
        return (self.image_size // self.patch_size) ** 2

    def layers(self, *, num_extra: int) -> Iterator["Layer"]:
        """Yield the layers in order; the first `num_extra` tokens are not part of the map."""
        for stage in self.stages():
            for number in stage.layers:
                shrinks = stage.number > 0 and number == stage.layers.start
                yield Layer(self, stage, number, num_extra, shrinks)


@dataclass(frozen=True)
class Layer:
    """Attention and MLP; with `shrinks`, they halve the side of the map and double the width."""

    options: Options
    stage: Stage
    number: int
    num_extra: int
    shrinks: bool

    @property
    def before(self) -> int:
        """Width of the input."""
        return self.stage.width // 2 if self.shrinks else self.stage.width

    def attention(self) -> "PooledAttention":
        """Build the attention, which follows a norm."""
        return PooledAttention(
            self.before,
            self.stage.width,
            self.stage.heads,
            side=self.stage.side * (2 if self.shrinks else 1),
            query_stride=2 if self.shrinks else 1,
            stride=max(self.options.pool // 2**self.stage.number, 1),
            num_extra=self.num_extra,
            dropout=self.options.attention_dropout,
        )

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield residual functions and the names of their units; if it shrinks, only the MLP."""
        width, drops = self.stage.width, self.options.drops_of(self.number)
        if not self.shrinks:
            yield f"layer{self.number}_attention", residual(Norm(width), self.attention(), **drops)
        body = mlp(width, 4 * width, dropout=self.options.dropout, std=(STD, STD))
        yield f"layer{self.number}_mlp", residual(Norm(width), body, **drops)


class PooledAttention(nn.Module):
    """Self-attention over the tokens of a square map, with pooled queries, keys and values.

    Args:
        width: Width of an input token.
        out: Width of an output token.
        heads: Number of heads; it divides `out`.
        side: Side of the map, in tokens.
        query_stride: Stride with which queries are pooled; 1 for no pooling.
        stride: Stride with which keys and values are pooled.
        num_extra: Number of tokens before those of the map, which are not pooled.
        dropout: Dropout rate of the attention weights.
    """

    def __init__(
        self,
        width: int,
        out: int,
        heads: int,
        *,
        side: int,
        query_stride: int,
        stride: int,
        num_extra: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = Linear(width, 3 * out, std=STD)
        layout = {"side": side, "num_extra": num_extra}
        self.pool_q = (
            MapPool(out // heads, query_stride, **layout) if query_stride > 1 else nn.Identity()
        )
        self.pool_k = MapPool(out // heads, stride, **layout)
        self.pool_v = MapPool(out // heads, stride, **layout)
        self.out = Linear(out, out, std=STD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = attend(self.pool_q(q), self.pool_k(k), self.pool_v(v), dropout=dropout)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dropout={self.dropout}"


class MapPool(nn.Module):
    """Pooling of (batch, heads, tokens, width) by a learned filter and a norm, head by head."""

    def __init__(self, width: int, stride: int, *, side: int, num_extra: int) -> None:
        super().__init__()
        self.side, self.num_extra = side, num_extra
        self.conv = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=width, bias=False)
        self.norm = Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(on_map(self.conv, x, self.side, self.num_extra))
        return y


def on_map(function: nn.Module, x: Tensor, side: int, num_extra: int) -> Tensor:
    """Apply a function to tokens (..., tokens, width) as a map; skip the first `num_extra`."""
    extra, tokens = x[..., :num_extra, :], x[..., num_extra:, :]
    maps = tokens.reshape(-1, side, side, x.shape[-1]).permute(0, 3, 1, 2)
    pooled = function(maps).flatten(2).transpose(1, 2).unflatten(0, x.shape[:-2])
    return torch.cat((extra, pooled), -2) if num_extra else pooled


class Shrink(nn.Module):
    """x -> P(M(n)) + A(n) with n = norm(x): a linear map M, max-pooling P, attention A."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.side, self.num_extra = 2 * layer.stage.side, layer.num_extra
        self.norm = Norm(layer.before)
        self.body = layer.attention()
        self.dropout = nn.Dropout(layer.options.dropout)
        self.drop_path = DropPath(layer.options.drops_of(layer.number)["drop_path"])
        self.shortcut = Linear(layer.before, layer.stage.width, std=STD)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        shortcut = on_map(self.pool, self.shortcut(n), self.side, self.num_extra)
        y: Tensor = shortcut + self.drop_path(self.dropout(self.body(n)))
        return y.to(x.dtype)  # streams keep their dtype under autocast


def mvit(options: Options) -> Units:
    """Build the units of an MViT: stem, two per layer, head."""
    stem = named(
        patches=Patches(options, overlap=True),
        token=ClassToken(options.width, std=STD),
        positions=Positions(options.num_tokens + 1, options.width),
        dropout=nn.Dropout(options.dropout),
    )
    units: Units = {"stem": stem}
    for layer in options.layers(num_extra=1):
        if layer.shrinks:
            units[f"layer{layer.number}_attention"] = Shrink(layer)
        units |= {name: Residual(f) for name, f in layer.functions()}
    head = named(
        norm=Norm(options.width_out),
        pool=First(),
        classes=Linear(options.width_out, options.num_classes, std=STD),
    )
    return {**units, "head": head}


def rev_mvit(options: Options) -> Units:
    """Build the units of a Rev-MViT: stem, two per layer, head."""
    stem = named(
        patches=Patches(options, overlap=True),
        positions=Positions(options.num_tokens, options.width),
        dropout=nn.Dropout(options.dropout),
        streams=Duplicate(),
    )
    units: Units = {"stem": stem}
    for layer in options.layers(num_extra=0):
        if layer.shrinks:
            units[f"layer{layer.number}_attention"] = named(
                fuse=fusion(layer.before), shrink=Shrink(layer)
            )
            ((name, f),) = layer.functions()
            units[name] = named(mlp=Residual(f), streams=Duplicate())
        else:
            units |= {name: Coupling(f) for name, f in layer.functions()}
    width = 2 * options.width_out
    head = named(
        pool=Mean(1), norm=Norm(width), classes=Linear(width, options.num_classes, std=STD)
    )
    return {**units, "head": head}
