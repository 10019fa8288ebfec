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
    """The part of a window's tokens that is asked for; one token at least."""
    mask: int
    """The token that stands for a hidden one: the first number that no other token has."""
    seed: int

    def __post_init__(self) -> None:
        is_number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not is_number or not 0 < self.rate <= 1:
            raise DataError(
                "masked is the part of the tokens that is hidden, a number above 0 and at most 1, "
                f"such as 0.15; got {self.rate!r}"
            )

    def hide(
        self, tokens: Tensor, places: Tensor, only: Tensor, *, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """What the model sees of windows, and its targets.

        Args:
            tokens: Windows of shape (N, context).
            places: Where in the text each token is.
            only: Those that may be asked for, one at least in each window.
            epoch: Its number.
        """
        where = {"seed": self.seed, "epoch": epoch}
        chances = draw(places, purpose="hidden", **where).masked_fill(~only, 2**63 - 1)
        ranks = chances.argsort(1).argsort(1)
        asked = ranks < (self.rate * only.sum(1, keepdim=True)).round().clamp(min=1)
        fate = draw(places, purpose="fate of the hidden", **where) % 10
        others = draw(places, purpose="in place of the hidden", **where) % self.mask
        seen = torch.where(asked & (fate < 8), self.mask, tokens)
        seen = torch.where(asked & (fate == 8), others, seen)
        return seen, torch.where(asked, tokens, IGNORED)
