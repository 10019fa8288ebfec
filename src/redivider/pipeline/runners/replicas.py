"""Gradients and running statistics of a stage, which its replicas average before an update."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from redivider.replay.statistics import counting_layers

if TYPE_CHECKING:
    from redivider.pipeline.runners.topology import Team


class Shares:
    """Tensors of a module that its replicas average, as one replica has them.

    A parameter that one replica has not used has a gradient of zero there.

    Args:
        module: Module of a stage.
    """

    def __init__(self, module: nn.Module) -> None:
        self._trained = [param for param in module.parameters() if param.requires_grad]
        self._grads = [
            torch.zeros_like(param) if param.grad is None else param.grad for param in self._trained
        ]
        self._is_used = [param.grad is not None for param in self._trained]
        layers = counting_layers(list(module.modules()))
        names = ("running_mean", "running_var")
        # By `.data`, because graphs in flight refer to statistics, which batch norm itself changes
        # without them noticing. Their backward does not read them.
        self._running = [layer.get_buffer(name).data for layer in layers for name in names]

    @property
    def are_complete(self) -> bool:
        """Whether all parameters that train have a gradient."""
        return all(self._is_used)

    @torch.no_grad()
    def average(self, team: "Team") -> None:
        """Average the tensors over the replicas, in place."""
        tensors: list[Tensor] = [*self._grads, *self._running]
        if not tensors:
            return
        used = torch.ones(len(self._trained), device=tensors[0].device)
        if not self.are_complete:
            used.copy_(torch.tensor(self._is_used))
        team.average([used, *tensors])
        if not self.are_complete:  # reading `used` waits for the GPU
            for param, grad, part in zip(self._trained, self._grads, used.tolist(), strict=True):
                param.grad = grad if part else None
