"""Look-ahead: a forward by weights that are predicted for the time of the backward.

Between the forward and the backward of a micro-batch a stage updates its weights n times. So
forward and backward run by weights that are nearer to each other.

    current weights   w0 --update--> w1 --update--> w2 --update--> w3         (n = 3)
    one micro-batch   forward                                      backward
      plain           by w0                                        by w3
      look-ahead      by p, close to w3                            by w3

    displacement   p = w0 + n d, where d is what the last update added, whatever the optimizer is
    momentum       the weights that n updates with gradients of zero would lead to:
      SGD          p = w0 - lr (m + m^2 + ... + m^n) v     v: momentum buffer, m: momentum factor
      Adam         as SGD with v the first moment, over the root of the second moment

    lead           forwards by w0; instead every update adds a (d - d of the update before)

Chen et al. 2018 (SpecTrain) keep the velocity constant, as the displacement does. The lead is of
Zmushko et al. 2026.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOOKAHEADS = (None, "momentum", "displacement", "lead")


def verify_lookahead(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose steps cannot be predicted."""
    kind = type(optimizer)
    if kind not in _RULES:
        known = ", ".join(known_kind.__name__ for known_kind in _RULES)
        raise ValueError(
            f"lookahead='momentum' knows {known}, not {kind.__name__}; take lookahead=True"
        )
    if any(group.get("momentum", 1) == 0 for group in optimizer.param_groups):
        raise ValueError("lookahead='momentum' needs SGD with a momentum, got momentum=0")


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
    """Correction for gradients that come late: predicted weights, or other updates."""

    changes_updates = False
    """Whether weights change after a step of the optimizer."""

    @abstractmethod
    def predict(self, optimizer: torch.optim.Optimizer, first: int, num: int) -> Prediction:
        """Predict the weights after `num` updates, of which `first` is the index of the first."""

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

    def predict(self, optimizer: torch.optim.Optimizer, first: int, num: int) -> Prediction:
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
        # Kept as a difference: what a caller does to weights between two updates is no motion.
        displacements = [self._displacements[param] for param in params]
        torch._foreach_copy_(displacements, params)
        yield
        torch._foreach_mul_(displacements, -1)
        torch._foreach_add_(displacements, params)


class Lead(WithDisplacements):
    """Updates that go further where the last one has grown.

    Args:
        late: Updates by which gradients come late.
    """

    changes_updates = True

    def __init__(self, late: float) -> None:
        super().__init__()
        self._factor = late + min(late, 1.0) if late <= 2 else late

    def predict(self, optimizer: torch.optim.Optimizer, first: int, num: int) -> Prediction:
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


class ByMomentum(Ahead):
    """Prediction by the momentum of SGD, Adam or AdamW.

    Args:
        factor: Factor of the learning rate, by the index of an update.
    """

    def __init__(self, factor: Callable[[int], float]) -> None:
        self._factor = factor
        self.coefficients: Sequence[Sequence[Tensor]] | None = None
        """Coefficients of the parameter groups on the device, in a captured tick."""

    def predict(self, optimizer: torch.optim.Optimizer, first: int, num: int) -> Prediction:
        return predict(optimizer, self.factors(first, num), self.coefficients)

    def watching(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self, names: dict[int, str]) -> dict[str, Tensor]:
        return {}  # all is in the optimizer

    def load_state_dict(self, state: dict[str, Tensor], params: Mapping[str, Tensor]) -> None:
        pass

    def factors(self, first: int, num: int) -> list[float]:
        """Return the factors of the learning rate for `num` updates from the first one on."""
        return [self._factor(update) for update in range(first, first + num)]


def predict(
    optimizer: torch.optim.Optimizer,
    factors: Sequence[float],
    by_group: Sequence[Sequence[Tensor]] | None = None,
) -> Prediction:
    """Predict the parameters after the next updates, as if all gradients were zero.

    Weight decay is ignored, and Adam's epsilon is scaled as in the first of these updates. A
    parameter that is frozen or has no momentum yet is not predicted.

    Args:
        optimizer: SGD, Adam or AdamW.
        factors: Factors of the learning rate, one per update.
        by_group: Coefficients of the parameter groups, if they are known (see `coefficients`).
    """
    rule, weights = _RULES[type(optimizer)], {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if parameter.requires_grad else None
            if not state or not rule.has_momentum(state):
                continue
            numbers: Sequence[Any] = (
                by_group[index] if by_group else rule.coefficients(group, factors, state)
            )
            weights[parameter] = (parameter - rule.step(group, state, numbers)).detach()
    return Prediction(len(factors), weights)


def coefficients(
    optimizer: torch.optim.Optimizer, factors: Sequence[float], num_done: Sequence[int]
) -> list[list[float]]:
    """Return the coefficients of every group, computed on the host.

    Args:
        optimizer: SGD, Adam or AdamW.
        factors: Factors of the learning rate, one per update.
        num_done: Number of steps that the groups have done.
    """
    rule = _RULES[type(optimizer)]
    return [
        rule.coefficients(group, factors, {"step": done})
        for group, done in zip(optimizer.param_groups, num_done, strict=True)
    ]


def steps_done(optimizer: torch.optim.Optimizer) -> list[int] | None:
    """Return the number of steps of every group; None if the parameters of a group differ."""
    num_done = []
    for group in optimizer.param_groups:
        states = [optimizer.state.get(parameter, {}) for parameter in group["params"]]
        done = {int(state["step"]) for state in states if "step" in state}
        if len(done) > 1:
            return None
        num_done.append(done.pop() if done else 0)
    return num_done


class _SGD:
    """Momentum buffer times the sum of lr m^i over the next updates i = 1, 2, ..., n."""

    @staticmethod
    def has_momentum(state: dict[str, Any]) -> bool:
        return state.get("momentum_buffer") is not None

    @staticmethod
    def coefficients(group: dict[str, Any], factors: Sequence[float], state: Any) -> list[float]:
        base, momentum = group.get("initial_lr", group["lr"]), group["momentum"]
        total = sum(base * factor * momentum ** (i + 1) for i, factor in enumerate(factors))
        return [total * momentum if group["nesterov"] else total]

    @staticmethod
    def step(group: dict[str, Any], state: dict[str, Any], numbers: Sequence[Any]) -> Tensor:
        step: Tensor = state["momentum_buffer"] * numbers[0]
        return step


class _Adam:
    """First moment times such a sum, over the root of the second moment."""

    @staticmethod
    def has_momentum(state: dict[str, Any]) -> bool:
        return "exp_avg" in state

    @staticmethod
    def coefficients(group: dict[str, Any], factors: Sequence[float], state: Any) -> list[Any]:
        first, second = group["betas"]
        base, done = group.get("initial_lr", group["lr"]), state["step"]
        if isinstance(done, Tensor) and not done.is_cuda:
            done = done.item()  # for double precision; on a GPU this would wait for the device
        # In the i-th update the root of the second moment is its current value times
        # `scales[i - 1]`, which includes the bias correction. The maximum of amsgrad does not fade.
        fading = 1.0 if group["amsgrad"] else second
        steps = range(1, len(factors) + 1)
        scales = [(fading**i / (1 - second ** (done + i))) ** 0.5 for i in steps]
        total = sum(
            base * factor * first**i / (1 - first ** (done + i)) / scale
            for i, factor, scale in zip(steps, factors, scales, strict=True)
        )
        return [total, group["eps"] / scales[0]]

    @staticmethod
    def step(group: dict[str, Any], state: dict[str, Any], numbers: Sequence[Any]) -> Tensor:
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        step: Tensor = state["exp_avg"] * numbers[0] / (square.sqrt() + numbers[1])
        return step


_RULES: dict[type, type[_SGD] | type[_Adam]] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _Adam,
}
