"""GPT and Rev-GPT: causal language models.

Radford et al. 2019 (GPT-2: learned positions, pre-norm, GELU by tanh), and the same residual
functions as couplings: the stem goes into both streams, which are averaged before the last norm, so
that the head is as wide as GPT's, and may be tied to the embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate, Fuse
from redivider.models.language import Language
from redivider.models.parts import Residual, Units, named, transformer_layers

SIZES: dict[str, dict[str, Any]] = {
    "nano": {"width": 384, "depth": 6, "heads": 6, "context": 256},
    "small": {"width": 768, "depth": 12, "heads": 12},
    "medium": {"width": 1024, "depth": 24, "heads": 16},
    "large": {"width": 1280, "depth": 36, "heads": 20},
}


@dataclass(frozen=True, kw_only=True)
class Options(Language):
    """Of GPT and Rev-GPT."""

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """The residual functions in order, with the names of their units."""
        std = 0.02, 0.02 / (2 * self.depth) ** 0.5  # the sum of all begins as large as one
        tanh_gelu = partial(nn.GELU, approximate="tanh")
        return transformer_layers(self, nn.LayerNorm, tanh_gelu, causal=True, std=std)


def gpt(options: Options) -> Units:
    """The units of a GPT: stem, two for each layer, norm, head."""
    layers = {name: Residual(f) for name, f in options.functions()}
    norm = nn.LayerNorm(options.width)
    return options.with_head({"stem": _stem(options), **layers, "norm": norm}, bias=False)


def rev_gpt(options: Options) -> Units:
    """The units of a Rev-GPT: stem, two for each layer, norm, head."""
    stem = _stem(options).append(Duplicate())
    layers = {name: Coupling(f) for name, f in options.functions()}
    norm = named(fuse=Fuse("mean"), norm=nn.LayerNorm(options.width))
    return options.with_head({"stem": stem, **layers, "norm": norm}, bias=False)


def _stem(options: Options) -> nn.Sequential:
    return named(**options.embedding(), dropout=nn.Dropout(options.dropout))
