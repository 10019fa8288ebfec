"""GPT and Rev-GPT: causal language models.

Radford et al. 2019 (GPT-2: learned positions, pre-norm, GELU by tanh), and the same residual
functions as couplings: the stem goes into both streams, which are averaged before the last norm, so
that the head is as wide as GPT's, and may be tied to the embedding.

The last unit is the head alone, a linear map: for a large vocabulary let a `ChunkedCrossEntropy`
have it instead, so that the logits never exist as a whole (see cross_entropy.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate, Fuse
from redivider.models.options import Layers, verify_flag, verify_positive
from redivider.models.parts import (
    Linear,
    Positions,
    Residual,
    Units,
    named,
    transformer_layers,
)

SIZES: dict[str, dict[str, Any]] = {
    "nano": {"width": 384, "depth": 6, "heads": 6, "context": 256},
    "small": {"width": 768, "depth": 12, "heads": 12},
    "medium": {"width": 1024, "depth": 24, "heads": 16},
    "large": {"width": 1280, "depth": 36, "heads": 20},
}


@dataclass(frozen=True, kw_only=True)
class Options(Layers):
    """Of GPT and Rev-GPT; `tied` lets head and embedding have the same weights."""

    vocabulary: int = 50257
    context: int = 1024
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        verify_positive(self, "vocabulary", "context")
        verify_flag(self, "tied")

    def example(self, batch: int = 8) -> Tensor:
        """A batch of random tokens."""
        return torch.randint(self.vocabulary, (batch, self.context))

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """The residual functions in order, with the names of their units."""
        std = 0.02, 0.02 / (2 * self.depth) ** 0.5  # the sum of all begins as large as one
        tanh_gelu = partial(nn.GELU, approximate="tanh")
        return transformer_layers(self, nn.LayerNorm, tanh_gelu, causal=True, std=std)


class Embedding(nn.Embedding):
    """Tokens to vectors that begin small."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)


def gpt(options: Options) -> Units:
    """The units of a GPT: stem, two for each layer, norm, head."""
    layers = {name: Residual(f) for name, f in options.functions()}
    norm = nn.LayerNorm(options.width)
    return _with_head(options, {"stem": _stem(options), **layers, "norm": norm})


def rev_gpt(options: Options) -> Units:
    """The units of a Rev-GPT: stem, two for each layer, norm, head."""
    stem = _stem(options).append(Duplicate())
    layers = {name: Coupling(f) for name, f in options.functions()}
    norm = named(fuse=Fuse("mean"), norm=nn.LayerNorm(options.width))
    return _with_head(options, {"stem": stem, **layers, "norm": norm})


def _stem(options: Options) -> nn.Sequential:
    return named(
        tokens=Embedding(options.vocabulary, options.width),
        positions=Positions(options.context, options.width),
        dropout=nn.Dropout(options.dropout),
    )


def _with_head(options: Options, units: Units) -> Units:
    head = Linear(options.width, options.vocabulary, std=0.02, bias=False)
    if options.tied:
        head.weight = units["stem"].tokens.weight  # type: ignore[union-attr, assignment]
    return {**units, "head": head}
