"""GPT and Rev-GPT: causal language models.

GPT is GPT-2 (Radford et al. 2019): learned positions, pre-norm, GELU approximated by tanh. Rev-GPT
has the same residual functions as couplings. The stem feeds both streams, and their mean enters the
last norm, so the head is as wide as GPT's and can be tied to the embedding.
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
    """Options of GPT and Rev-GPT."""

    def functions(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the residual functions in order, with the names of their units."""
        # The outputs of the 2 * depth residual functions add up to the variance of one.
        std = 0.02, 0.02 / (2 * self.depth) ** 0.5
        tanh_gelu = partial(nn.GELU, approximate="tanh")
        return transformer_layers(self, nn.LayerNorm, tanh_gelu, causal=True, std=std)


def gpt(options: Options) -> Units:
    """Build the units of a GPT: stem, two per layer, norm, head."""
    layers = {name: Residual(f) for name, f in options.functions()}
    norm = nn.LayerNorm(options.width)
    return options.with_head({"stem": _stem(options), **layers, "norm": norm}, bias=False)


def rev_gpt(options: Options) -> Units:
    """Build the units of a Rev-GPT: stem, two per layer, norm, head."""
    stem = _stem(options).append(Duplicate())
    layers = {name: Coupling(f) for name, f in options.functions()}
    norm = named(fuse=Fuse("mean"), norm=nn.LayerNorm(options.width))
    return options.with_head({"stem": stem, **layers, "norm": norm}, bias=False)


def _stem(options: Options) -> nn.Sequential:
    return named(**options.embedding(), dropout=nn.Dropout(options.dropout))
