"""Look-ahead: a forward by weights that are predicted for the time of the backward.

Between the forward and the backward of a micro-batch a stage updates its weights n times. With
look-ahead the weights of the two are closer to each other.

    current weights   w0 --update--> w1 --update--> w2 --update--> w3         (n = 3)
    one micro-batch   forward                                      backward
      plain           by w0                                        by w3
      look-ahead      by p, close to w3                            by w3

    displacement   p = w0 + n d, where d is what the last update added, whatever the optimizer is
    lead           forwards by w0; instead every update adds a (d - d of the update before)

The displacement is of Chen et al. 2018 (SpecTrain), the lead of Zmushko et al. 2026.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# "momentum" was a prediction of its own, and did worse.
LOOKAHEADS = {
    None: None,
    False: None,
    True: "displacement",
    "displacement": "displacement",
    "momentum": "displacement",
    "lead": "lead",
}


@dataclass(frozen=True)
class Prediction:
    """Predicted weights, by parameter, after `num_updates` updates.

    Parameters that will not move are left out.
    """

    num_updates: int
    weights: dict[Tensor, Tensor]

    def has_any(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether one of the parameters will move."""
        return any(parameter in self.weights for parameter in parameters)


class Ahead(ABC):
    """Correction for late gradients: predicted weights, or changed updates."""

    changes_updates = False
    """Whether weights change after a step of the optimizer."""

    @abstractmethod
    def predict(self, num: int) -> Prediction:
        """Predict the weights after `num` updates."""

    @abstractmethod
    def watching(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return a context for a step of the optimizer."""

    @abstractmethod
    def state_dict(self, names: dict[int, str]) -> dict[str, Tensor]:
        """Return what the next predictions depend on, by the names of parameters."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor], params: Mapping[str, Tensor]) -> None:
        """Load a state of `state_dict`."""


class WithDisplacements(Ahead):
    """Correction that needs what the last update added to every weight."""

    def __init__(self) -> None:
        self._displacements: dict[Tensor, Tensor] = {}

    def state_dict(self, names: dict[int, str]) -> dict[str, Tensor]:
        return {names[id(param)]: tensor for param, tensor in self._displacements.items()}

    def load_state_dict(self, state: dict[str, Tensor], params: Mapping[str, Tensor]) -> None:
        self._displacements = {params[name]: t.to(params[name]) for name, t in state.items()}


class ByDisplacement(WithDisplacements):
    """Prediction by the last displacement of the weights."""

    def predict(self, num: int) -> Prediction:
        moved = [param for param in self._displacements if param.requires_grad]
        if not moved:
            return Prediction(num, {})
        displacements = [self._displacements[param] for param in moved]
        with torch.no_grad():
            weights = torch._foreach_add(moved, displacements, alpha=num)
        return Prediction(num, dict(zip(moved, weights, strict=True)))

    @contextmanager
    def watching(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            if param not in self._displacements:
                self._displacements[param] = torch.empty_like(param)
        # Only the step itself counts: a caller may change weights between two updates.
        displacements = [self._displacements[param] for param in params]
        torch._foreach_copy_(displacements, params)
        yield
        torch._foreach_mul_(displacements, -1)
        torch._foreach_add_(displacements, params)


class Lead(WithDisplacements):
    """Updates that go further where the last one has grown.

    Args:
        late: Number of updates by which gradients are late.
    """

    changes_updates = True

    def __init__(self, late: float) -> None:
        super().__init__()
        self._factor = late + min(late, 1.0) if late <= 2 else late

    def predict(self, num: int) -> Prediction:
        return Prediction(num, {})

    @contextmanager
    def watching(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in params]
        yield
        displacements = torch._foreach_sub(params, before)
        if len(self._displacements) < len(params):  # the first update
            self._displacements = dict(zip(params, displacements, strict=True))
            return
        last = [self._displacements[param] for param in params]
        growth = torch._foreach_sub(displacements, last)
        fault: Tensor | None = getattr(optimizer, "found_inf", None)
        if fault is not None:  # a step that was skipped leads nowhere
            torch._foreach_mul_(growth, (fault == 0).to(growth[0].dtype))
        torch._foreach_add_(params, growth, alpha=self._factor)
        torch._foreach_copy_(last, displacements)
