"""Compiled update of a stage: the optimizer's step and the casts of its weights, in few kernels.

The fused kernels of torch's optimizers assign 65,536 weights to a block of threads. A stage with
few weights then keeps few blocks busy, for a long time. In a captured tick every branch ends with
this update.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from redivider._torch_private import loops_in_order
from redivider.compile import own_code
from redivider.optim.muon import SETTINGS as MUON_SETTINGS
from redivider.optim.muon import Muon, muon
from redivider.pipeline.stages.fused_optimizer import has_hooks, rate_dtype
from redivider.pipeline.stages.gradients import widen

Group = dict[str, Any]

SGD_SETTINGS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
ADAM_SETTINGS = ("betas", "weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")


class CompiledUpdate:
    """Compiled steps of SGD, Adam, AdamW and Muon; groups of equal signature share a graph.

    Args:
        options: Options of `torch.compile`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._runs: dict[Any, Callable[..., None]] = {}

    def step(self, optimizer: Optimizer, copies: dict[Tensor, Tensor]) -> bool:
        """Step an optimizer and cast its weights to their copies; return False if it cannot.

        The first step is one that it cannot do, because it creates the optimizer's state.

        Args:
            optimizer: The optimizer.
            copies: Low-precision copies, by weight.
        """
        plans = [_plan(optimizer, group) for group in optimizer.param_groups]
        if has_hooks(optimizer) or any(plan is None for plan in plans):
            return False
        for group, (run, lists, settings) in zip(optimizer.param_groups, plans, strict=True):
            weights = lists[0]
            if not weights:
                continue
            device = weights[0].device
            rate = group["lr"]
            if not isinstance(rate, Tensor):
                # A tensor, so that one compiled graph serves every rate.
                rate = torch.full((), rate, dtype=rate_dtype(device), device=device)
            fault = getattr(optimizer, "found_inf", None)
            if fault is None:
                fault = torch.zeros((), device=device)
            cast = [weight for weight in weights if weight in copies]
            compiled = self._compiled(run, (weights, cast), repr(settings))
            with loops_in_order():
                compiled(*lists, cast, [copies[weight] for weight in cast], rate, fault, settings)
        return True

    def widen(self, wide: list[Tensor], narrow: list[Tensor]) -> None:
        """Copy gradients to the precision of their weights, as `gradients.widen` does."""
        self._compiled(widen, (wide, narrow), "")(wide, narrow)

    def _compiled(
        self, run: Callable[..., None], tensors: Sequence[Sequence[Tensor]], settings: str
    ) -> Callable[..., None]:
        """Return the compiled function for tensors of this signature."""
        signature = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            for group in tensors
            for tensor in group
        )
        key = (run, tuple(map(len, tensors)), signature, settings)
        if key not in self._runs:
            self._runs[key] = torch.compile(own_code(run), **self._options)
        return self._runs[key]


def _plan(optimizer: Optimizer, group: Group) -> Any:
    """Return the function of a group's step, its lists of tensors and its settings, or None."""
    weights = [param for param in group["params"] if param.grad is not None]
    states = [optimizer.state.get(weight, {}) for weight in weights]
    if type(optimizer) is SGD:
        names = ["momentum_buffer"] if group["momentum"] else []
        settings: tuple[str, ...] = SGD_SETTINGS
        run: Callable[..., None] = _sgd if names else _plain_sgd
    elif type(optimizer) in (Adam, AdamW):
        names = ["exp_avg", "exp_avg_sq", "step", *["max_exp_avg_sq"] * group["amsgrad"]]
        settings, run = ADAM_SETTINGS, _adam
    elif type(optimizer) is Muon:
        names, settings, run = _MUON_KINDS[group["kind"]]
    else:
        return None
    lists = [weights, [weight.grad for weight in weights]]
    lists += [[state.get(name) for state in states] for name in names]
    if any(tensor is None for tensors in lists for tensor in tensors):
        return None
    pairs = zip(states, weights, strict=True)
    if "step" in names and any(state["step"].device != weight.device for state, weight in pairs):
        return None  # steps are counted on the host
    return run, lists, {name: group[name] for name in settings}


def _plain_sgd(weights: Any, grads: Any, *rest: Any) -> None:
    _sgd(weights, grads, [None] * len(weights), *rest)


def _sgd(
    weights: Any,
    grads: Any,
    moments: Any,
    cast: Any,
    copies: Any,
    rate: Any,
    fault: Any,
    settings: Any,
) -> None:
    grads, rate = _zero_on_fault(fault, grads, rate)
    sgd(weights, grads, moments, foreach=True, lr=rate, **settings)
    if copies:
        torch._foreach_copy_(copies, cast)


def _adam(weights: Any, grads: Any, moments: Any, squares: Any, steps: Any, *rest: Any) -> None:
    *largest, cast, copies, rate, fault, settings = rest  # `largest` with amsgrad only
    grads, rate = _zero_on_fault(fault, grads, rate)
    beta1, beta2 = settings["betas"]
    others = {name: value for name, value in settings.items() if name != "betas"}
    lists = weights, grads, moments, squares, largest[0] if largest else [], steps
    run: Any = adam
    run(*lists, foreach=True, capturable=True, lr=rate, beta1=beta1, beta2=beta2, **others)
    if copies:
        torch._foreach_copy_(copies, cast)


def _muon(weights: Any, grads: Any, moments: Any, *rest: Any) -> None:
    cast, copies, rate, fault, settings = rest
    muon(weights, grads, moments, rate=rate, found_inf=fault, **settings)
    if copies:
        torch._foreach_copy_(copies, cast)


def _muon_sgd(weights: Any, grads: Any, moments: Any, *rest: Any) -> None:
    cast, copies, rate, fault, settings = rest
    if settings["weight_decay"]:
        decay = torch.where(fault == 0, rate, 0) * settings["weight_decay"]
        torch._foreach_mul_(weights, 1 - decay)
    settings = {**settings, "weight_decay": 0.0, "dampening": 0.0, "maximize": False}
    _sgd(weights, grads, moments, cast, copies, rate, fault, settings)


def _muon_adamw(*lists: Any) -> None:
    *others, settings = lists
    fixed = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    _adam(*others, {**settings, **fixed})


def _zero_on_fault(fault: Tensor, grads: list[Tensor], rate: Tensor) -> tuple[list[Tensor], Tensor]:
    """Zero the gradients and the rate after a fault, so that the step changes no weight."""
    is_sound = fault == 0
    return [torch.where(is_sound, grad, 0) for grad in grads], torch.where(is_sound, rate, 0)


# By the kind of a group of Muon: names in the state of a parameter, settings, and the step.
_MUON_KINDS: dict[str, tuple[list[str], tuple[str, ...], Callable[..., None]]] = {
    "muon": (["momentum_buffer"], MUON_SETTINGS, _muon),
    "sgd": (["momentum_buffer"], ("momentum", "nesterov", "weight_decay"), _muon_sgd),
    "adamw": (["exp_avg", "exp_avg_sq", "step"], ("betas", "weight_decay", "eps"), _muon_adamw),
}
