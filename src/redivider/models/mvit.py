"""MViT and Rev-MViT: attention whose keys, values and at times queries are pooled maps.

Fan et al. 2021 for images, with a class token and wider channels made inside attention (as in Li et
al. 2022, and in the reversible one), and Mangalam et al. 2022: layers that keep the shape are
couplings, with the pooling inside of F; the first layer of a later stage is two junctions, which
fuse the streams, attend with pooled queries, and give the result to both streams. No class token
there: the head reads the averages of both streams side by side.
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
    Norm,
    Pool,
    Positions,
    Residual,
    Units,
    mlp,
    named,
    residual,
)
from redivider.models.patches import OverlappingPatches

SIZES: dict[str, dict[str, Any]] = {
    "base": {"width": 96, "depths": (1, 2, 11, 2), "heads": 1},
}


@dataclass(frozen=True, kw_only=True)
class Options(Hierarchy):
    """Of MViT and Rev-MViT."""

    pool: int = 4
    """The stride at which the first stage pools keys and values; later ones halve it, down to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        verify_positive(self, "pool")

    @property
    def num_tokens(self) -> int:
        """Tokens of an image in the first stage, without a class token."""
        return (self.image_size // self.patch_size) ** 2

    def layers(self, *, num_extra: int) -> Iterator["Layer"]:
        """All layers in order; `num_extra` tokens before those of the map are not pooled."""
        for stage in self.stages():
            for number in stage.layers:
                shrinks = stage.number > 0 and number == stage.layers.start
                yield Layer(self, stage, number, num_extra, shrinks)


@dataclass(frozen=True)
class Layer:
    """Attention and MLP; where it `shrinks`, it halves the map and doubles the width."""

    options: Options
    stage: Stage
    number: int
    num_extra: int
    shrinks: bool

    @property
    def before(self) -> int:
        """The width of its input."""
        return self.stage.width // 2 if self.shrinks else self.stage.width

    def attention(self) -> "PooledAttention":
        """Of the layer's input, after its norm."""
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
        """Its residual functions; of one that shrinks, the MLP alone."""
        width, drops = self.stage.width, self.options.drops_of(self.number)
        if not self.shrinks:
            yield f"layer{self.number}_attention", residual(Norm(width), self.attention(), **drops)
        body = mlp(width, 4 * width, dropout=self.options.dropout, std=(STD, STD))
        yield f"layer{self.number}_mlp", residual(Norm(width), body, **drops)


class PooledAttention(nn.Module):
    """Self-attention over the tokens of a square map, which are pooled first.

    Args:
        width: Of a token.
        out: Width of what comes out.
        heads: Their number, which divides that.
        side: Of the map.
        query_stride: That of the queries' pooling; 1 leaves them as they are.
        stride: That of the keys' and values' pooling.
        num_extra: Tokens before those of the map, which are not pooled.
        dropout: Of the attention's weights.
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
        made_for = {"side": side, "num_extra": num_extra}
        self.pool_q = (
            MapPool(out // heads, query_stride, **made_for) if query_stride > 1 else nn.Identity()
        )
        self.pool_k = MapPool(out // heads, stride, **made_for)
        self.pool_v = MapPool(out // heads, stride, **made_for)
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
    """Pools each head of (batch, heads, tokens, width) as a map, by a learned filter and a norm."""

    def __init__(self, width: int, stride: int, *, side: int, num_extra: int) -> None:
        super().__init__()
        self.side, self.num_extra = side, num_extra
        self.conv = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=width, bias=False)
        self.norm = Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(on_map(self.conv, x, self.side, self.num_extra))
        return y


def on_map(function: nn.Module, x: Tensor, side: int, num_extra: int) -> Tensor:
    """Apply to tokens (..., tokens, width) as a map; those before the map's stay as they are."""
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
        kept = on_map(self.pool, self.shortcut(n), self.side, self.num_extra)
        y: Tensor = kept + self.drop_path(self.dropout(self.body(n)))
        return y.to(x.dtype)  # autocast does not narrow a stream


def mvit(options: Options) -> Units:
    """The units of an MViT: stem, two for each layer, head."""
    stem = named(
        patches=OverlappingPatches(options),
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
    """The units of a Rev-MViT: stem, two for each layer, head."""
    stem = named(
        patches=OverlappingPatches(options),
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
        pool=Pool(1), norm=Norm(width), classes=Linear(width, options.num_classes, std=STD)
    )
    return {**units, "head": head}
