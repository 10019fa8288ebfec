"""Masking for masked language models.

Devlin et al. 2018: of the tokens to predict, 80 % are replaced by the mask token, 10 % by a random
token, and 10 % stay unchanged. As in RoBERTa (Liu et al. 2019), every epoch masks other tokens. All
windows have the same number of targets, so that all batches have the same weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redivider.data.errors import DataError
from redivider.data.order import draw

IGNORED = -100  # target that torch's cross-entropy ignores


@dataclass(frozen=True)
class Masking:
    """Choice of masked tokens: a pure function of the seed, the epoch and the position."""

    rate: float
    """Fraction of the tokens of a window to predict; at least one token."""
    mask: int
    """Mask token: the first number that no other token has."""
    seed: int

    def __post_init__(self) -> None:
        is_number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not is_number or not 0 < self.rate <= 1:
            raise DataError(
                "masked is the part of the tokens that is hidden, a number above 0 and at most 1, "
                f"such as 0.15; got {self.rate!r}"
            )

    def hide(
        self, tokens: Tensor, positions: Tensor, eligible: Tensor, *, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Return the masked windows and their targets.

        Args:
            tokens: Windows of shape (N, context).
            positions: Position of each token in the text.
            eligible: Whether each token may be a target; at least one in each window.
            epoch: Number of the epoch.
        """
        key = {"seed": self.seed, "epoch": epoch}
        # The tokens with the smallest random numbers are the targets; ineligible ones come last.
        priority = draw(positions, purpose="hidden", **key).masked_fill(~eligible, 2**63 - 1)
        rank = priority.argsort(1).argsort(1)
        is_target = rank < (self.rate * eligible.sum(1, keepdim=True)).round().clamp(min=1)
        fate = draw(positions, purpose="fate of the hidden", **key) % 10
        random_tokens = draw(positions, purpose="in place of the hidden", **key) % self.mask
        inputs = torch.where(is_target & (fate < 8), self.mask, tokens)
        inputs = torch.where(is_target & (fate == 8), random_tokens, inputs)
        return inputs, torch.where(is_target, tokens, IGNORED)
