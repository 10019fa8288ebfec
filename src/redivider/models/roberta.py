"""RoBERTa and Rev-RoBERTa: bidirectional language models that predict masked words.

RoBERTa is that of Liu et al. 2019, with post-norm. Its token type is left out: it is constant, and
only adds to the positions. Rev-RoBERTa consists of couplings with pre-norm, as Rev-GPT: the stem
feeds both streams, and their mean enters the head. All sequences of a batch have the same length;
there is no padding mask.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from redivider.coupling import Coupling
from redivider.junction import Duplicate, Fuse
from redivider.models.language import Language
from redivider.models.parts import Linear, Units, named, transformer_layers

SIZES: dict[str, dict[str, Any]] = {
    "base": {"width": 768, "depth": 12, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
}
STD = 0.02, 0.02  # of the initial weights, into and out of a residual function


@dataclass(frozen=True, kw_only=True)
class Options(Language):
    """Options of RoBERTa and Rev-RoBERTa."""

    masked: ClassVar[bool] = True

    vocabulary: int = 50265
    context: int = 512


class NormedSum(nn.Module):
    """x -> norm(x + f(x)): a post-norm residual."""

    def __init__(self, f: nn.Module, width: int) -> None:
        super().__init__()
        self.f = f
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.f(x))
        return y


def roberta(options: Options) -> Units:
    """Build the units of a RoBERTa: stem, two per layer, transform, head."""
    functions = transformer_layers(options, nn.Identity, std=STD)
    layers = {name: NormedSum(f, options.width) for name, f in functions}
    units = {"stem": _stem(options), **layers, "transform": named(**_transform(options.width))}
    return options.with_head(units, bias=True)


def rev_roberta(options: Options) -> Units:
    """Build the units of a Rev-RoBERTa: stem, two per layer, transform, head."""
    functions = transformer_layers(options, nn.LayerNorm, std=STD)
    layers = {name: Coupling(f) for name, f in functions}
    transform = named(
        fuse=Fuse("mean"),
        norm_streams=nn.LayerNorm(options.width),
        **_transform(options.width),
    )
    units = {"stem": _stem(options).append(Duplicate()), **layers, "transform": transform}
    return options.with_head(units, bias=True)


def _stem(options: Options) -> nn.Sequential:
    return named(
        **options.embedding(),
        norm=nn.LayerNorm(options.width),
        dropout=nn.Dropout(options.dropout),
    )


def _transform(width: int) -> dict[str, nn.Module]:
    return {
        "dense": Linear(width, width, std=0.02),
        "activation": nn.GELU(),
        "norm": nn.LayerNorm(width),
    }
