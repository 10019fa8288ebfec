"""Language models: tokens in, a logit for every word of the vocabulary out.

The last unit is the head alone, a linear map. For a large vocabulary hand it to a
`ChunkedCrossEntropy` instead, so that the logits never exist as a whole (see cross_entropy.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from redivider.models.options import Layers, verify_flag, verify_positive
from redivider.models.parts import Linear, Positions, Units, verify_tokens


@dataclass(frozen=True, kw_only=True)
class Language(Layers):
    """Options of language models; with `tied`, head and embedding share their weights."""

    masked: ClassVar[bool] = False
    """True for models that predict masked words, False for those that predict the next word."""

    vocabulary: int = 50257
    context: int = 1024
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        verify_positive(self, "vocabulary", "context")
        verify_flag(self, "tied")

    def example(self, batch: int = 8) -> Tensor:
        """Return a batch of random tokens."""
        return torch.randint(self.vocabulary, (batch, self.context))

    def embedding(self) -> dict[str, nn.Module]:
        """Build the parts of the stem that embed tokens and positions."""
        return {
            "tokens": Embedding(self.vocabulary, self.width),
            "positions": Positions(self.context, self.width),
        }

    def with_head(self, units: Units, *, bias: bool) -> Units:
        """Return the units with the head appended."""
        head = Linear(self.width, self.vocabulary, std=0.02, bias=bias)
        if self.tied:
            head.weight = units["stem"].tokens.weight  # type: ignore[union-attr, assignment]
        return {**units, "head": head}


class Embedding(nn.Embedding):
    """Embedding with small initial weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Context(nn.Module):
    """Identity that refuses sequences longer than the context, for models without `Positions`."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def forward(self, x: Tensor) -> Tensor:
        verify_tokens(x, self.num_tokens)
        return x

    def extra_repr(self) -> str:
        return str(self.num_tokens)
