"""The weights by which a unit runs: those of now, old ones, predicted ones, or ones cast before.

A method says whether the backward of a micro-batch sees the weights of its forward, which are then
kept, or those of now. Look-ahead gives a forward the weights that momentum predicts. Under autocast
the weights of now may be there in its precision already.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.methods import Stash, Version
from redivider.pipeline.stages.casts import Casts, watching
from redivider.pipeline.stages.lookahead import Prediction

NOW: Version = (0, 0)  # where no version is kept


class Weights:
    """Those of one unit.

    Args:
        parameters: The unit's own.
        stashes: Whether backwards see the weights of their forwards.
    """

    def __init__(self, parameters: Sequence[Tensor], *, stashes: bool) -> None:
        self.parameters = parameters
        self.stash = Stash(parameters) if stashes else None
        self.casts: dict[torch.dtype, Casts] = {}

    def of_forward(
        self, dtype: torch.dtype | None, ahead: Prediction | None, *, with_graph: bool
    ) -> tuple[Sequence[Tensor], Version]:
        """The weights of a forward, and what its backward will ask for.

        Args:
            dtype: To what autocast casts, if it does.
            ahead: What is predicted of them.
            with_graph: Whether a graph will hold on to them.
        """
        if ahead is not None and ahead.has_any(self.parameters):
            others = [ahead.weights.get(each, each) for each in self.parameters]
            if self.stash is None:
                return others, NOW
            # Those that momentum does not move may still be updated.
            pairs = zip(others, self.parameters, strict=True)
            others = [each.detach().clone() if each is own else each for each, own in pairs]
            return others, self.stash.borrow(ahead.num_updates, others)
        if self.stash is None:
            return self.of_backward(NOW, dtype), NOW
        version = self.stash.borrow()
        return self.stash.pin() if with_graph else self.parameters, version

    def of_backward(self, version: Version, dtype: torch.dtype | None) -> Sequence[Tensor]:
        """The weights of the backward of a forward that had this version."""
        if self.stash:
            return self.stash.weights(version)
        casts = None if dtype is None else self.casts.get(dtype)
        return self.parameters if casts is None else casts.standing_in(self.parameters)

    def give_back(self, version: Version) -> None:
        """That backward is done."""
        if self.stash:
            self.stash.give_back(version)

    def learn_casts(
        self, dtype: torch.dtype | None, ahead: Prediction | None, run: Callable[[], Any]
    ) -> None:
        """Learn, from a run that leaves no trace, which weights autocast casts at every use."""
        known = dtype is None or dtype in self.casts
        if dtype is not None and not known and self.stash is None and ahead is None:
            with watching(self.parameters, dtype) as found:
                run()
            self.casts[dtype] = Casts(found, dtype)
