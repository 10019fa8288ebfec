"""Hidden tokens: what a masked language model is asked for.

Devlin et al. 2018: of the tokens that are asked for, eight of ten are replaced by a mask, one by
any token, and one is left as it is. As in RoBERTa (Liu et al. 2019) every epoch hides others. Every
window has as many of them, so that all batches weigh the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redivider.data.errors import DataError
from redivider.data.order import draw

IGNORED = -100  # what torch's cross-entropy leaves out


@dataclass(frozen=True)
class Masking:
    """Which tokens are hidden: a pure function of the seed, the epoch and their place."""

    rate: float
    """The part of a window that is asked for; one token at least."""
    mask: int
    """The token that stands for a hidden one: the first number that no other token has."""
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise DataError(f"masked must be above 0 and at most 1, got {self.rate}")

    def hide(
        self, tokens: Tensor, places: Tensor, outside: Tensor, *, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """What the model sees of windows, and its targets.

        Args:
            tokens: Windows of shape (N, context).
            places: Where in the text each token is.
            outside: Those that are not in the text, and not asked for.
            epoch: Its number.
        """
        where = {"seed": self.seed, "epoch": epoch}
        chances = draw(places, purpose="hidden", **where).masked_fill(outside, 2**63 - 1)
        num = max(1, round(self.rate * tokens.shape[1]))
        chosen = chances.topk(num, largest=False).indices
        asked = torch.zeros_like(outside).scatter(1, chosen, True) & ~outside
        fate = draw(places, purpose="fate of the hidden", **where) % 10
        others = draw(places, purpose="in place of the hidden", **where) % self.mask
        seen = torch.where(asked & (fate < 8), self.mask, tokens)
        seen = torch.where(asked & (fate == 8), others, seen)
        return seen, torch.where(asked, tokens, IGNORED)
