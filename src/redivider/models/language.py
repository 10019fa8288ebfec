"""What language models share: tokens in, a score for every word of the vocabulary out.

The last unit is the head alone, a linear map: for a large vocabulary let a `ChunkedCrossEntropy`
have it instead, so that the logits never exist as a whole (see cross_entropy.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from redivider.models.options import Layers, verify_flag, verify_positive
from redivider.models.parts import Linear, Positions, Units


@dataclass(frozen=True, kw_only=True)
class Language(Layers):
    """Of language models; `tied` lets head and embedding have the same weights."""

    masked: ClassVar[bool] = False
    """Whether it learns words that were hidden from it; otherwise the next word."""

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

    def embedding(self) -> dict[str, nn.Module]:
        """The parts of a stem that make vectors of tokens and their places."""
        return {
            "tokens": Embedding(self.vocabulary, self.width),
            "positions": Positions(self.context, self.width),
        }

    def with_head(self, units: Units, *, bias: bool) -> Units:
        """All units, the head last."""
        head = Linear(self.width, self.vocabulary, std=0.02, bias=bias)
        if self.tied:
            head.weight = units["stem"].tokens.weight  # type: ignore[union-attr, assignment]
        return {**units, "head": head}


class Embedding(nn.Embedding):
    """Tokens to vectors that begin small."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
