"""A stage's update, compiled: the optimizer's step and the weights cast anew, in a kernel or two.

The fused kernels of torch's optimizers give a block of threads 65,536 weights, so a stage of few
weights keeps few blocks busy, for long. In a captured tick that is the end of every branch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from redivider.compiled import own_code
from redivider.pipeline.stages.fused_optimizer import has_hooks, rate_dtype
from redivider.pipeline.stages.gradients import widen

Group = dict[str, Any]

SGD_SETTINGS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
ADAM_SETTINGS = ("betas", "weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")


class CompiledUpdate:
    """Runs the steps of optimizers; groups of parameters that are alike share their graphs.

    Args:
        options: Those of `torch.compile`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._runs: dict[Any, Callable[..., None]] = {}

    def step(self, optimizer: Optimizer, copies: dict[Tensor, Tensor]) -> bool:
        """Do an optimizer's step and cast its weights to their copies; False if it cannot.

        The first step cannot be: it makes the optimizer's state.
        """
        plans = [_plan(optimizer, group) for group in optimizer.param_groups]
        if has_hooks(optimizer) or any(plan is None for plan in plans):
            return False
        for group, (run, lists, options) in zip(optimizer.param_groups, plans, strict=True):
            weights = lists[0]
            if not weights:
                continue
            device = weights[0].device
            rate = group["lr"]
            if not isinstance(rate, Tensor):
                rate = torch.full((), rate, dtype=rate_dtype(device), device=device)
            fault = getattr(optimizer, "found_inf", None)
            if fault is None:
                fault = torch.zeros((), device=device)
            cast = [each for each in weights if each in copies]
            compiled = self._compiled(run, (weights, cast), repr(options))
            compiled(*lists, cast, [copies[each] for each in cast], rate, fault, options)
        return True

    def widen(self, wide: list[Tensor], narrow: list[Tensor]) -> None:
        """As gradients.py has it."""
        self._compiled(widen, (wide, narrow), "")(wide, narrow)

    def _compiled(
        self, run: Callable[..., None], tensors: Sequence[Sequence[Tensor]], others: str
    ) -> Callable[..., None]:
        looks = tuple((t.shape, t.stride(), t.dtype, t.device) for each in tensors for t in each)
        kind = (run, tuple(map(len, tensors)), looks, others)
        if kind not in self._runs:
            self._runs[kind] = torch.compile(own_code(run), **self._options)
        return self._runs[kind]


def _plan(optimizer: Optimizer, group: Group) -> Any:
    """What runs a group's step, its lists of tensors, and its other settings."""
    weights = [each for each in group["params"] if each.grad is not None]
    states = [optimizer.state.get(each, {}) for each in weights]
    if type(optimizer) is SGD:
        names = ["momentum_buffer"] if group["momentum"] else []
        settings: tuple[str, ...] = SGD_SETTINGS
        run: Callable[..., None] = _sgd if names else _plain_sgd
    elif type(optimizer) in (Adam, AdamW):
        names = ["exp_avg", "exp_avg_sq", "step", *["max_exp_avg_sq"] * group["amsgrad"]]
        settings, run = ADAM_SETTINGS, _adam
    else:
        return None
    lists = [weights, [each.grad for each in weights]]
    lists += [[each.get(name) for each in states] for name in names]
    if any(each is None for some in lists for each in some):
        return None
    pairs = zip(states, weights, strict=True)
    if "step" in names and any(state["step"].device != each.device for state, each in pairs):
        return None  # they are counted on the host
    return run, lists, {name: group[name] for name in settings}


def _plain_sgd(weights: Any, grads: Any, *rest: Any) -> None:
    _sgd(weights, grads, [None] * len(weights), *rest)


def _sgd(
    weights: Any, grads: Any, moments: Any, cast: Any, copies: Any, rate: Any, fault: Any, by: Any
) -> None:
    grads, rate = _unless(fault, grads, rate)
    sgd(weights, grads, moments, foreach=True, lr=rate, **by)
    if copies:
        torch._foreach_copy_(copies, cast)


def _adam(weights: Any, grads: Any, moments: Any, squares: Any, steps: Any, *rest: Any) -> None:
    *largest, cast, copies, rate, fault, by = rest
    grads, rate = _unless(fault, grads, rate)
    (beta1, beta2), others = by["betas"], {k: v for k, v in by.items() if k != "betas"}
    lists = weights, grads, moments, squares, largest[0] if largest else [], steps
    run: Any = adam
    run(*lists, foreach=True, capturable=True, lr=rate, beta1=beta1, beta2=beta2, **others)
    if copies:
        torch._foreach_copy_(copies, cast)


def _unless(fault: Tensor, grads: list[Tensor], rate: Tensor) -> tuple[list[Tensor], Tensor]:
    """After a fault a step must change no weight, whatever the gradients are."""
    sound = fault == 0
    return [torch.where(sound, each, 0) for each in grads], torch.where(sound, rate, 0)
