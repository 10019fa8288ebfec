"""Rollback of the trial runs of a training step.

A capture runs a step several times before the caller trains with it. All state that the step
changes is saved when the step first reaches it, and restored afterwards: weights and state of
optimizers that step, weights, gradients and buffers of chains that run, and random numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from redivider.chain import Chain
from redivider.errors import CaptureError

# The state of these begins at zero, so that it can be restored although it was created in a trial.
BEGIN_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "RMSprop", "RAdam", "Muon")


class Rollback:
    """Saved state of everything that a step changes."""

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
    def parameters(self) -> list[Tensor]:
        """Weights of the chains and optimizers that the step has used."""
        return list(self._grads)

    def add_chain(self, chain: Chain) -> None:
        """Save the state of a chain that is about to run."""
        if not any(known is chain for known in self.chains):
            self.chains.append(chain)
            self._save(chain.buffers())
            self._add_parameters(chain.parameters())

    def add_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Save the state of an optimizer that is about to step."""
        if any(known is optimizer for known in self.optimizers):
            return
        self.optimizers.append(optimizer)
        self._add_parameters(p for group in optimizer.param_groups for p in group["params"])
        self._states[id(optimizer)] = {
            (id(parameter), key): value.clone()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        self._settings += [
            (group, {key: group[key] for key in ("lr", "capturable") if key in group})
            for group in optimizer.param_groups
        ]

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Add every optimizer that steps inside."""
        handle = register_optimizer_step_pre_hook(self.add_optimizer)
        try:
            yield
        finally:
            handle.remove()

    def prepare_optimizers(self) -> None:
        """Move learning rates to the device; refuse optimizers that a graph would run wrongly."""
        for optimizer in self.optimizers:
            self._verify(optimizer)
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True  # a fused one is, even if its group says False
                on_device = group.get("capturable") or group.get("fused")
                if on_device and group["params"] and not isinstance(group["lr"], Tensor):
                    device = group["params"][0].device
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def poll(self) -> None:
        """Raise faults and warn of drift that the chains have reported."""
        for chain in self.chains:
            chain.poll()

    def restore(self, *, settings: bool = False) -> None:
        """Restore all saved state; with `settings`, also those of the optimizers."""
        torch.set_rng_state(self._random[0])
        torch.cuda.set_rng_state(self._random[1], self._device)
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.copy_(before)
            for optimizer in self.optimizers:
                saved = self._states[id(optimizer)]  # without state that the trial has created
                for parameter, state in optimizer.state.items():
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            old = saved.get((id(parameter), key))
                            value.zero_() if old is None else value.copy_(old)
        for parameter, grad in self._grads.items():
            parameter.grad = grad
        for group, original in self._settings if settings else ():
            group.update(original)

    def _verify(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            if "capturable" in group and not (group["capturable"] or group.get("fused")):
                raise CaptureError(
                    f"{name} counts its steps on the host; make it with capturable=True or "
                    "fused=True, when the model is on the GPU"
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
                f"cannot roll back {name} after warm-up, because its initial state is unknown; "
                "call optimizer.step() once before rd.capture()"
            )

    def _save(self, tensors: Iterable[Tensor]) -> None:
        self._before += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def _add_parameters(self, parameters: Iterable[Tensor]) -> None:
        new = [parameter for parameter in parameters if parameter not in self._grads]
        self._save(new)
        self._grads |= {parameter: None for parameter in new}


class Settings:
    """Settings of optimizers between captured steps: only learning rates may change."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [
            (optimizer, index, group, {k: v for k, v in group.items() if k != "params"})
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
        ]
        # The graph writes to this memory even if the optimizer has replaced it.
        self._state = [
            (optimizer, parameter, dict(state))
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
        ]

    def refresh(self) -> None:
        """Copy changed learning rates to the device; refuse all other changes."""
        for optimizer, parameter, state in self._state[:1]:
            current = optimizer.state[parameter]
            if any(current.get(key) is not value for key, value in state.items()):
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

    def _refuse(self, optimizer: Optimizer, reason: str) -> None:
        raise CaptureError(f"{type(optimizer).__name__} {reason}; capture the step again")
