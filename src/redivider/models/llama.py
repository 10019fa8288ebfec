"""Llama and Rev-Llama: causal language models with rotary positions.

Llama is Llama 3 (Dubey et al. 2024): pre-norm by RMSNorm, SwiGLU, no biases, and grouped queries:
several heads share their keys and values. Sizes are those of Llama 3.2 (1B, 3B) and 3.1 (8B).
Rev-Llama has the same residual functions as couplings, and begins and ends as Rev-GPT does: the
stem feeds both streams, and their mean enters the last norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate, Fuse
from redivider.models.attention import attend
from redivider.models.language import Context, Embedding, Language
from redivider.models.options import OptionError, verify_positive
from redivider.models.parts import Linear, Residual, SwiGLU, Units, named, residual
from redivider.models.rope import Rope

V3_1: dict[str, Any] = {"rope_factor": 8.0}
V3_2: dict[str, Any] = {"rope_factor": 32.0, "tied": True}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 384, "depth": 6, "heads": 6, "kv_heads": 2, "hidden": 1024, "context": 256},
    "1b": {"width": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, **V3_2},
    "3b": {"width": 3072, "depth": 28, "heads": 24, "kv_heads": 8, "hidden": 8192, **V3_2},
    "8b": {"width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, **V3_1},
}
Norm = partial(nn.RMSNorm, eps=1e-5)


@dataclass(frozen=True, kw_only=True)
class Options(Language):
    """Options of Llama and Rev-Llama."""

    vocabulary: int = 128256
    context: int = 131072
    kv_heads: int | None = None
    """Number of heads of keys and values; `heads` by default."""
    rope_theta: float = 500000.0
    rope_factor: float = 1.0
    """Divisor of RoPE's frequencies of long wavelengths; 1 for RoPE without scaling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None:
            verify_positive(self, "kv_heads")
            if self.heads % self.kv_heads:
                raise OptionError(
                    f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values; "
                    f"make heads a multiple of {self.kv_heads}, or change kv_heads"
                )
        if self.width // self.heads % 2:
            raise OptionError(
                f"head width {self.width // self.heads} is odd, and RoPE rotates pairs; "
                f"make width {self.width} a multiple of {2 * self.heads}, or change heads"
            )
        for name in ("rope_theta", "rope_factor"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 1 <= value < inf:
                raise OptionError(f"{name} must be a number, 1 or more, got {value!r}")

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the residual functions in order, with the names of their units."""
        # The outputs of the 2 * depth residual functions add up to the variance of one.
        std = 0.02, 0.02 / (2 * self.depth) ** 0.5
        for layer in range(self.depth):
            drops = self.drops_of(layer)
            attention = GroupedAttention(self, std=std)
            yield f"layer{layer}_attention", residual(Norm(self.width), attention, **drops)
            body = SwiGLU(self.width, self.middle, std=std)
            yield f"layer{layer}_mlp", residual(Norm(self.width), body, **drops)


class GroupedAttention(nn.Module):
    """Causal self-attention with RoPE, in which groups of heads share their keys and values.

    Args:
        options: Widths, numbers of heads and RoPE of the model.
        std: Standard deviations of the initial weights of `qkv` and `out`.
    """

    def __init__(self, options: Options, *, std: tuple[float, float]) -> None:
        super().__init__()
        heads, kv_heads = options.heads, options.kv_heads or options.heads
        width = options.width // heads
        self.num_heads = (heads, kv_heads, kv_heads)
        self.dropout = options.attention_dropout
        self.qkv = Linear(options.width, sum(self.num_heads) * width, std=std[0], bias=False)
        self.rope = Rope(width, theta=options.rope_theta, factor=options.rope_factor)
        self.out = Linear(options.width, options.width, std=std[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (sum(self.num_heads), -1)).transpose(1, 2)
        q, k, v = heads.split(self.num_heads, dim=1)
        q, k = self.rope(q, k)
        y = attend(q, k, v, dropout=self.dropout if self.training else 0.0, causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def extra_repr(self) -> str:
        return f"heads={self.num_heads[0]}, kv_heads={self.num_heads[1]}, dropout={self.dropout}"


def llama(options: Options) -> Units:
    """Build the units of a Llama: stem, two per layer, norm, head."""
    layers = {name: Residual(f) for name, f in options.functions()}
    units = {"stem": _stem(options), **layers, "norm": Norm(options.width)}
    return options.with_head(units, bias=False)


def rev_llama(options: Options) -> Units:
    """Build the units of a Rev-Llama: stem, two per layer, norm, head."""
    stem = _stem(options).append(Duplicate())
    layers = {name: Coupling(f) for name, f in options.functions()}
    norm = named(fuse=Fuse("mean"), norm=Norm(options.width))
    return options.with_head({"stem": stem, **layers, "norm": norm}, bias=False)


def _stem(options: Options) -> nn.Sequential:
    return named(
        tokens=Embedding(options.vocabulary, options.width),
        context=Context(options.context),
        dropout=nn.Dropout(options.dropout),
    )
