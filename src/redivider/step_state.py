"""What a training step changes, as far as it can be found out while it runs.

A capture runs a step several times before it is asked to train. What the step changes is remembered
at first sight, before the change, and put back afterwards: the weights and the state of optimizers
that step, weights, gradients and buffers of chains that run, and random numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from redivider.chain import Chain
from redivider.errors import CaptureError

# These begin with a state of zeros, so that it is known how to put it back.
BEGIN_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "RMSprop", "RAdam")


class StepState:
    """Remembers what a step changes, and puts it back."""

    def __init__(self, device: torch.device) -> None:
        self.optimizers: list[Optimizer] = []
        self.chains: list[Chain] = []
        self._device = device
        self._before: list[tuple[Tensor, Tensor]] = []
        self._grads: dict[Tensor, Tensor | None] = {}
        self._states: dict[int, dict[tuple[int, str], Tensor]] = {}
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state(device)

    @property
    def chooses(self) -> bool:
        """Whether a chain asks which way is faster."""
        return any(chain.backward == "auto" for chain in self.chains)

    @property
    def parameters(self) -> list[Tensor]:
        """All weights that the step reads or trains, as far as they are known."""
        return list(self._grads)

    def meet_chain(self, chain: Chain) -> None:
        """Remember a chain that is about to run."""
        if not any(each is chain for each in self.chains):
            self.chains.append(chain)
            self._remember(chain.buffers())
            self._meet_parameters(chain.parameters())

    def meet_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Remember an optimizer that is about to step."""
        if any(each is optimizer for each in self.optimizers):
            return
        self.optimizers.append(optimizer)
        self._meet_parameters(each for group in optimizer.param_groups for each in group["params"])
        self._states[id(optimizer)] = {
            (id(parameter), key): value.clone()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        kept = ("lr", "capturable")
        self._settings += [
            (group, {key: group[key] for key in kept if key in group})
            for group in optimizer.param_groups
        ]

    @contextmanager
    def optimizers_seen(self) -> Iterator[None]:
        """Meet every optimizer that steps inside."""
        handle = register_optimizer_step_pre_hook(self.meet_optimizer)
        try:
            yield
        finally:
            handle.remove()

    def prepare_optimizers(self) -> None:
        """Let learning rates be read on the device; refuse what a graph would do wrongly."""
        for optimizer in self.optimizers:
            self._verify(optimizer)
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True  # as a fused one is, without saying so
                on_device = group.get("capturable") or group.get("fused")
                if on_device and group["params"] and not isinstance(group["lr"], Tensor):
                    device = group["params"][0].device
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def read_mail(self) -> None:
        """Hear what the chains have to say of faults and drift."""
        for chain in self.chains:
            chain.poll()

    def put_back(self, *, settings: bool = False) -> None:
        """Undo what the runs of the step have done; `settings`: of the optimizers, too."""
        torch.set_rng_state(self._random[0])
        torch.cuda.set_rng_state(self._random[1], self._device)
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.copy_(before)
            for optimizer in self.optimizers:
                saved = self._states[id(optimizer)]
                for parameter, state in optimizer.state.items():
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            old = saved.get((id(parameter), key))
                            value.zero_() if old is None else value.copy_(old)
        for parameter, grad in self._grads.items():
            parameter.grad = grad
        for group, before_it in self._settings if settings else ():
            group.update(before_it)

    def _verify(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            if "capturable" in group and not (group["capturable"] or group.get("fused")):
                raise CaptureError(
                    f"{name} counts its steps on the host; make it with capturable=True or "
                    "fused=True"
                )
        numbers = [
            key
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.is_cuda)
        ]
        if numbers:
            raise CaptureError(
                f"{name} keeps {numbers[0]!r} on the host, where a captured step would not change "
                "it; use another optimizer, or step it outside"
            )
        is_new = not self._states[id(optimizer)] and bool(optimizer.state)
        dampens = any(group.get("dampening") for group in optimizer.param_groups)
        if is_new and (name not in BEGIN_AT_ZERO or dampens):
            raise CaptureError(
                f"it is not known how the state of {name} begins, so that trying the step out "
                "cannot be undone; let it make a step before it is captured"
            )

    def _remember(self, tensors: Iterable[Tensor]) -> None:
        self._before += [(each, each.detach().clone()) for each in tensors]

    def _meet_parameters(self, parameters: Iterable[Tensor]) -> None:
        new = [each for each in parameters if each not in self._grads]
        self._remember(new)
        self._grads |= {each: None for each in new}


class Settings:
    """The settings of optimizers between captured steps: rates may change, the rest may not."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [
            (optimizer, index, group, {k: v for k, v in group.items() if k != "params"})
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
        ]
        # The graph writes to this memory, whoever else holds it.
        self._state = [
            (optimizer, parameter, dict(state))
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
        ]

    def refresh(self) -> None:
        """Bring changed rates to the device; refuse what the graph cannot follow."""
        for optimizer, parameter, state in self._state[:1]:
            now = optimizer.state[parameter]
            if any(now.get(key) is not value for key, value in state.items()):
                self._refuse(optimizer, "has other state than it had, as after load_state_dict")
        for optimizer, index, group, captured in self._groups:
            if optimizer.param_groups[index] is not group:
                self._refuse(optimizer, "has other groups than it had, as after load_state_dict")
            for key, value in captured.items():
                if key == "lr" and isinstance(value, Tensor) and group["lr"] is not value:
                    value.fill_(group["lr"])
                    group["lr"] = value
                elif group[key] is not value and group[key] != value:
                    hint = "; a fused one can" if key == "lr" else ""
                    change = f"was captured with {key} = {value!r} and cannot have {group[key]!r}"
                    self._refuse(optimizer, change + hint)

    def _refuse(self, optimizer: Optimizer, what: str) -> None:
        raise CaptureError(f"{type(optimizer).__name__} {what}; capture the step again")
