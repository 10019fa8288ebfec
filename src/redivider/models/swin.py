"""Swin and Rev-Swin: attention in windows that shift from layer to layer.

Swin is that of Liu et al. 2021, Rev-Swin that of Zhu and Mangalam 2023. In Rev-Swin, attention and
MLP are couplings within a stage. A junction between stages fuses the streams, merges patches of
2 x 2 tokens, and feeds the result to both streams. The head reads both streams, concatenated.
Streams are maps of shape (batch, side, side, width).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate, Fuse
from redivider.models.attention import attend
from redivider.models.hierarchy import STD, Hierarchy, Stage, fusion
from redivider.models.options import OptionError, verify_positive
from redivider.models.parts import Linear, Mean, Residual, Units, mlp, named, residual
from redivider.models.patches import Patches

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 96, "depths": (2, 2, 6, 2), "heads": 3},
    "small": {"width": 96, "depths": (2, 2, 18, 2), "heads": 3},
    "base": {"width": 128, "depths": (2, 2, 18, 2), "heads": 4},
    "large": {"width": 192, "depths": (2, 2, 18, 2), "heads": 6},
    "huge": {"width": 352, "depths": (2, 2, 18, 2), "heads": 8},
    "giant": {"width": 512, "depths": (2, 2, 42, 2), "heads": 16},
}


@dataclass(frozen=True, kw_only=True)
class Options(Hierarchy):
    """Options of Swin and Rev-Swin."""

    window: int = 7
    """Side of a window, in tokens; a smaller map is one window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        verify_positive(self, "window")
        for stage in self.stages():
            if stage.side > self.window and stage.side % self.window:
                raise OptionError(
                    f"windows of {self.window} do not cover the {stage.side} x {stage.side} tokens "
                    f"of stage {stage.number + 1}; change window, image_size or patch_size"
                )

    def functions(self, stage: Stage) -> Iterator[tuple[str, nn.Module]]:
        """Yield the residual functions of a stage in order, with the names of their units."""
        window = min(self.window, stage.side)
        for layer in stage.layers:
            drops = self.drops_of(layer)
            is_odd = (layer - stage.layers.start) % 2 == 1
            attention = WindowAttention(
                stage.width,
                stage.heads,
                side=stage.side,
                window=window,
                shift=window // 2 if is_odd and window < stage.side else 0,
                dropout=self.attention_dropout,
            )
            norm = nn.LayerNorm(stage.width)
            yield f"layer{layer}_attention", residual(norm, attention, **drops)
            body = mlp(stage.width, 4 * stage.width, dropout=self.dropout, std=(STD, STD))
            yield f"layer{layer}_mlp", residual(nn.LayerNorm(stage.width), body, **drops)


class WindowAttention(nn.Module):
    """Self-attention among the tokens of each window, with a bias for every offset.

    Args:
        width: Width of a token.
        heads: Number of heads; it divides the width.
        side: Side of the square map.
        window: Side of a window; it divides the side of the map.
        shift: Shift of the windows, down and to the right; they wrap around, but tokens from
            opposite edges do not attend to each other.
        dropout: Dropout rate of the attention weights.
    """

    def __init__(
        self, width: int, heads: int, *, side: int, window: int, shift: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.window, self.shift, self.dropout = heads, window, shift, dropout
        self.qkv = Linear(width, 3 * width, std=STD)
        self.bias = OffsetBias(window, heads)
        self.edges = Edges(side, window, shift) if shift else None
        self.out = Linear(width, width, std=STD)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        windows = _cut(x, self.window)
        num = windows.shape[1]
        # Windows are folded into the heads, so that biases and masks broadcast over the batch.
        qkv = self.qkv(windows).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)
        bias = self.bias().expand(num, -1, -1, -1)
        if self.edges is not None:
            bias = bias + self.edges()
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, bias=bias.flatten(0, 1).to(q.dtype), dropout=dropout)
        y = y.view(x.shape[0], num, self.heads, *y.shape[2:]).transpose(2, 3).flatten(3)
        y = _join(self.out(y), x.shape[1])
        return y.roll((self.shift, self.shift), (1, 2)) if self.shift else y

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, window={self.window}, shift={self.shift}, dropout={self.dropout}"
        )


class OffsetBias(nn.Module):
    """Relative position bias of the tokens in a window: (heads, tokens, tokens).

    The table has one dimension, as all biases have: weight decay recognises them by that.
    """

    index: Tensor

    def __init__(self, window: int, heads: int) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2 * heads))
        self.register_buffer("index", torch.empty(window**4, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a small normal table, and compute the entry of every pair of tokens."""
        nn.init.normal_(self.table, std=STD)
        coords = torch.arange(self.window, device=self.index.device)
        rows, columns = coords.repeat_interleave(self.window), coords.repeat(self.window)
        # Offsets of a pair, shifted to begin at 0.
        down, right = (x[:, None] - x + self.window - 1 for x in (rows, columns))
        self.index.copy_((down * (2 * self.window - 1) + right).flatten())

    def forward(self) -> Tensor:
        num_tokens = self.window**2
        bias = F.embedding(self.index, self.table.view(-1, self.heads))
        return bias.view(num_tokens, num_tokens, -1).permute(2, 0, 1)


class Edges(nn.Module):
    """Mask of shifted windows, which wrap around the edges: (windows, 1, tokens, tokens).

    Args:
        side: Side of the square map.
        window: Side of a window.
        shift: Shift of the windows.
    """

    mask: Tensor

    def __init__(self, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.shift = side, window, shift
        shape = (side // window) ** 2, 1, window**2, window**2
        self.register_buffer("mask", torch.empty(shape), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set 0 for pairs from the same side of an edge, minus infinity for the others."""
        coords = torch.arange(self.side, device=self.mask.device)
        wrapped = (coords >= self.side - self.shift).long()  # from the opposite edge
        regions = 2 * wrapped[:, None] + wrapped
        in_windows = _cut(regions[None, :, :, None], self.window)[0, :, None, :, 0]
        apart = in_windows[..., None, :] != in_windows[..., None]
        self.mask.copy_(torch.where(apart, -torch.inf, 0.0))

    def forward(self) -> Tensor:
        return self.mask


def _cut(x: Tensor, window: int) -> Tensor:
    """Cut maps into windows: (batch, side, side, width) to (batch, windows, tokens, width)."""
    batch, side, _, width = x.shape
    num = side // window
    cut = x.reshape(batch, num, window, num, window, width).transpose(2, 3)
    return cut.reshape(batch, num * num, window * window, width)


def _join(windows: Tensor, side: int) -> Tensor:
    """Invert `_cut`."""
    batch, _, tokens, width = windows.shape
    window = round(tokens**0.5)
    num = side // window
    cut = windows.reshape(batch, num, num, window, window, width).transpose(2, 3)
    return cut.reshape(batch, side, side, width)


class Merge(nn.Module):
    """Patch merging: 2 x 2 tokens become one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = Linear(4 * width, 2 * width, std=STD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        four = x.reshape(batch, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 4, 2, 5)
        y: Tensor = self.reduce(self.norm(four.flatten(3)))
        return y.to(x.dtype)  # streams keep their dtype under autocast


def swin(options: Options) -> Units:
    """Build the units of a Swin: stem, two per layer, a merge between stages, head."""
    units: Units = {"stem": _stem(options)}
    for stage in options.stages():
        if stage.number:
            units[f"merge{stage.number}"] = Merge(stage.width // 2)
        units |= {name: Residual(f) for name, f in options.functions(stage)}
    return {**units, "head": named(**_head(options.width_out, options.num_classes))}


def rev_swin(options: Options) -> Units:
    """Build the units of a Rev-Swin: stem, two per layer, a junction between stages, head."""
    units: Units = {"stem": _stem(options).append(Duplicate())}
    for stage in options.stages():
        if stage.number:
            before = stage.width // 2
            units[f"merge{stage.number}"] = named(
                fuse=fusion(before), merge=Merge(before), streams=Duplicate()
            )
        units |= {name: Coupling(f) for name, f in options.functions(stage)}
    head = named(both=Fuse("concat"), **_head(2 * options.width_out, options.num_classes))
    return {**units, "head": head}


def _stem(options: Options) -> nn.Sequential:
    side = options.image_size // options.patch_size
    return named(
        patches=Patches(options),
        norm=nn.LayerNorm(options.width),
        map=nn.Unflatten(1, (side, side)),
        dropout=nn.Dropout(options.dropout),
    )


def _head(width: int, num_classes: int) -> dict[str, nn.Module]:
    return {
        "norm": nn.LayerNorm(width),
        "pool": Mean(1, 2),
        "classes": Linear(width, num_classes, std=STD),
    }
