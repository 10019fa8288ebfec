"""Weights predicted for the time of the backward.

Between the forward and the backward of a micro-batch a stage updates its weights n times. Momentum
says where they are going: `predict` gives them as n updates with gradients of zero would leave
them. A forward by those meets, in its backward, weights that are nearer to its own.

    SGD    w - lr (m + m^2 + ... + m^n) v          v: the momentum, m: its factor
    Adam   the same with its first moment, each update divided by the second one's root

Chen et al. 2018 (SpecTrain) let the velocity stay as it is; letting it fade was measured better
here (docs/trade-offs.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOOKAHEADS = (None, "momentum")


def verify_lookahead(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose next steps nobody knows how to predict."""
    kind = type(optimizer)
    if kind not in _KINDS:
        known = ", ".join(each.__name__ for each in _KINDS)
        raise ValueError(f"lookahead='momentum' knows {known}, not {kind.__name__}")
    if any(group.get("momentum", 1) == 0 for group in optimizer.param_groups):
        raise ValueError("lookahead='momentum' needs SGD with a momentum, got momentum=0")


@dataclass(frozen=True)
class Prediction:
    """What some parameters will be after so many updates; those that will not move are left out."""

    num_updates: int
    weights: dict[Tensor, Tensor]

    def has_any(self, parameters: Sequence[Tensor]) -> bool:
        """Whether one of them will move."""
        return any(each in self.weights for each in parameters)


def predict(
    optimizer: torch.optim.Optimizer,
    factors: Sequence[float],
    given: Sequence[Sequence[Tensor]] | None = None,
) -> Prediction:
    """The parameters as the next updates would leave them if all their gradients were zero.

    Weight decay is left out, and Adam's epsilon is that of the first of them for all. What has no
    momentum yet, or does not train, stays where it is and is not among the results.

    Args:
        optimizer: SGD, Adam or AdamW.
        factors: Of the learning rate, for each of these updates.
        given: The coefficients of each group, where somebody has worked them out already.
    """
    kind, found = _KINDS[type(optimizer)], {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if parameter.requires_grad else None
            if not state or not kind.moves(state):
                continue
            numbers: Sequence[Any] = given[index] if given else kind.numbers(group, factors, state)
            found[parameter] = (parameter - kind.step(group, state, numbers)).detach()
    return Prediction(len(factors), found)


def coefficients(
    optimizer: torch.optim.Optimizer, factors: Sequence[float], num_done: Sequence[int]
) -> list[list[float]]:
    """What `predict` needs of each group beside its tensors, if it has done so many steps."""
    kind = _KINDS[type(optimizer)]
    return [
        kind.numbers(group, factors, {"step": done})
        for group, done in zip(optimizer.param_groups, num_done, strict=True)
    ]


def steps_done(optimizer: torch.optim.Optimizer) -> list[int] | None:
    """The steps that each group has done, read on the host; None where its parameters differ."""
    found = []
    for group in optimizer.param_groups:
        states = [optimizer.state.get(each, {}) for each in group["params"]]
        done = {int(state["step"]) for state in states if "step" in state}
        if len(done) > 1:
            return None
        found.append(done.pop() if done else 0)
    return found


class _SGD:
    """The momentum, times the rates of the next updates with its factor to their numbers."""

    @staticmethod
    def moves(state: dict[str, Any]) -> bool:
        return state.get("momentum_buffer") is not None

    @staticmethod
    def numbers(group: dict[str, Any], factors: Sequence[float], state: Any) -> list[float]:
        base, momentum = group.get("initial_lr", group["lr"]), group["momentum"]
        total = sum(base * factor * momentum ** (i + 1) for i, factor in enumerate(factors))
        return [total * momentum if group["nesterov"] else total]

    @staticmethod
    def step(group: dict[str, Any], state: dict[str, Any], numbers: Sequence[Any]) -> Tensor:
        step: Tensor = state["momentum_buffer"] * numbers[0]
        return step


class _Adam:
    """The same with the first moment, over the root of the second."""

    @staticmethod
    def moves(state: dict[str, Any]) -> bool:
        return "exp_avg" in state

    @staticmethod
    def numbers(group: dict[str, Any], factors: Sequence[float], state: Any) -> list[Any]:
        first, second = group["betas"]
        base, done = group.get("initial_lr", group["lr"]), state["step"]
        if isinstance(done, Tensor) and not done.is_cuda:
            done = done.item()  # in double precision; on a device nobody waits for it
        # The second moment's root in the i-th update is `scales[i]` times that of now; a maximum
        # stays.
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


_KINDS: dict[type, type[_SGD] | type[_Adam]] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _Adam,
}
