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
    if kind not in _STEPS:
        known = ", ".join(each.__name__ for each in _STEPS)
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


def predict(optimizer: torch.optim.Optimizer, factors: Sequence[float]) -> Prediction:
    """The parameters as the next updates would leave them if all their gradients were zero.

    Weight decay is left out, and Adam's epsilon is that of the first of them for all. What has no
    momentum yet, or does not train, stays where it is and is not among the results.

    Args:
        optimizer: SGD, Adam or AdamW.
        factors: Of the learning rate, for each of these updates.
    """
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        base = group.get("initial_lr", group["lr"])
        rates = [base * factor for factor in factors]
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if parameter.requires_grad else None
            step = _STEPS[type(optimizer)](group, state, rates) if state else None
            if step is not None:
                found[parameter] = (parameter - step).detach()
    return Prediction(len(factors), found)


def _sgd(group: dict[str, Any], state: dict[str, Any], rates: Sequence[Any]) -> Tensor | None:
    velocity = state.get("momentum_buffer")
    if velocity is None:
        return None
    momentum = group["momentum"]
    total = sum(rate * momentum ** (i + 1) for i, rate in enumerate(rates))
    step: Tensor = velocity * (total * momentum if group["nesterov"] else total)
    return step


def _adam(group: dict[str, Any], state: dict[str, Any], rates: Sequence[Any]) -> Tensor:
    first, second = group["betas"]
    done = state["step"]
    if isinstance(done, Tensor) and not done.is_cuda:
        done = done.item()  # in double precision; on a device nobody waits for it
    # The second moment's root in the i-th update is `scales[i]` times that of now; a maximum stays.
    fading = 1.0 if group["amsgrad"] else second
    scales = [(fading**i / (1 - second ** (done + i))) ** 0.5 for i in range(1, len(rates) + 1)]
    total = sum(
        rate * first**i / (1 - first ** (done + i)) / scale
        for i, (rate, scale) in enumerate(zip(rates, scales, strict=True), start=1)
    )
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    step: Tensor = state["exp_avg"] * total / (square.sqrt() + group["eps"] / scales[0])
    return step


_STEPS = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}
