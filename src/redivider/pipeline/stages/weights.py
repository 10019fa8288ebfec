"""Weights that a unit runs with: current, stashed, predicted, or cast for autocast.

    weights of the method    forward                 backward of the same micro-batch
    current                  current, or predicted   current
    stashed                  current, or predicted   those of the forward

Predicted weights come with look-ahead (lookahead.py), stashed ones from a `Stash` (stash.py).
Under autocast the current weights of an unstashed unit are used in its precision (casts.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.stages.casts import Casts, watching
from redivider.pipeline.stages.lookahead import Prediction
from redivider.pipeline.stages.stash import Stash, Version

UNVERSIONED: Version = (0, 0)  # of units without a stash, which only have current weights


class Weights:
    """Weights of one unit.

    Args:
        parameters: Parameters of the unit.
        stashes: Whether a backward uses the weights of its forward, not the current ones.
    """

    def __init__(self, parameters: Sequence[Tensor], *, stashes: bool) -> None:
        self.parameters = parameters
        self.stash = Stash(parameters) if stashes else None
        self.casts: dict[torch.dtype, Casts] = {}

    def of_forward(
        self, dtype: torch.dtype | None, ahead: Prediction | None, *, with_graph: bool
    ) -> tuple[Sequence[Tensor], Version]:
        """Return the weights of a forward, and their version, which the backward will ask for.

        Args:
            dtype: Dtype to which autocast casts; None without autocast.
            ahead: Predicted weights; None without look-ahead.
            with_graph: Whether a graph will refer to the weights until the backward.
        """
        if ahead is not None and ahead.has_any(self.parameters):
            predicted = [ahead.weights.get(param, param) for param in self.parameters]
            if self.stash is None:
                return predicted, UNVERSIONED
            # A parameter that is not predicted may still be updated, so it is copied.
            pairs = zip(predicted, self.parameters, strict=True)
            predicted = [
                weight.detach().clone() if weight is param else weight for weight, param in pairs
            ]
            return predicted, self.stash.borrow(ahead.num_updates, predicted)
        if self.stash is None:
            return self.of_backward(UNVERSIONED, dtype), UNVERSIONED
        version = self.stash.borrow()
        # A graph does not survive an update in place, so it gets a copy at once.
        return self.stash.pin() if with_graph else self.parameters, version

    def of_backward(self, version: Version, dtype: torch.dtype | None) -> Sequence[Tensor]:
        """Return the weights of a backward.

        Args:
            version: Version that `of_forward` returned for the micro-batch.
            dtype: Dtype to which autocast casts; None without autocast.
        """
        if self.stash:
            return self.stash.weights(version)
        casts = None if dtype is None else self.casts.get(dtype)
        return self.parameters if casts is None else casts.substitute(self.parameters)

    def give_back(self, version: Version) -> None:
        """Release a version, after the backward that needed it."""
        if self.stash:
            self.stash.give_back(version)

    def learn_casts(
        self, dtype: torch.dtype | None, ahead: Prediction | None, run: Callable[[], Any]
    ) -> None:
        """Find the weights that autocast casts at every use, once per dtype.

        Args:
            dtype: Dtype to which autocast casts; None without autocast.
            ahead: Predicted weights. With these, or with a stash, nothing is cast in advance.
            run: Runs the unit without side effects.
        """
        is_known = dtype is None or dtype in self.casts
        if dtype is not None and not is_known and self.stash is None and ahead is None:
            with watching(self.parameters, dtype) as always_cast:
                run()
            self.casts[dtype] = Casts(always_cast, dtype)
