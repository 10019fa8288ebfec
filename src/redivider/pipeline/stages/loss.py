"""The loss at the end of a pipeline: forward and gradient in one go."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from redivider.arithmetic import Arithmetic
from redivider.errors import UnitError
from redivider.pipeline.stages.aliasing import apart
from redivider.pipeline.stages.gradients import accumulate, may_need
from redivider.pipeline.stages.module_state import load_state, state_of
from redivider.pipeline.stages.stage import Message, Stage
from redivider.pipeline.stages.unit import Flow
from redivider.replay import Call, GraphRun, Record
from redivider.replay.random import Seeded
from redivider.tree import tensors_of


class Loss:
    """A function or module of (output, target) that returns a loss, or (loss, aux).

    Args:
        function: The caller's.
        index: Its place behind all units; random numbers depend on it.
        seed: Of the pipeline's random numbers.
    """

    def __init__(self, function: Callable[..., Any], index: int, seed: int) -> None:
        self.module = function if isinstance(function, nn.Module) else _Function(function)
        self._index = index
        self._seed = seed

    def hang_in(self, stage: Stage) -> None:
        """Let the last stage own the loss's parameters."""
        if any(True for _ in self.module.parameters()):
            if "loss" in stage.module._modules:
                raise ValueError(
                    "a unit of the last stage is called 'loss', as is the loss, which has "
                    "parameters too; give the unit another name"
                )
            stage.module.add_module("loss", self.module)

    def state_dict(self) -> dict[str, Any]:
        """Its weights, and their gradients summed so far."""
        return state_of(self.module, self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a state."""
        load_state(self.module, state)

    def run(
        self, message: Message, arithmetic: Arithmetic, guard: Callable[[Tensor, int], None]
    ) -> tuple[Message, Tensor, Any]:
        """Turn the model's output into the loss, and its gradient into a message downwards.

        `guard` is given the loss, and the micro-batch, before any of that.
        """
        run, num_values, parameters = self._run(message, arithmetic, Call.only_run)
        loss, aux = _parted(run.output)
        n, flow = message.microbatch, message.flow
        guard(loss, n)
        grads = _pull_back(run, loss)
        own = grads[len(grads) - len(parameters) :]
        accumulate(parameters, own, others=grads[:num_values])
        below = flow if flow.dtype is not None else Flow(None)
        down = Message(n, below, message.autocast, message.side, grads=grads[:num_values])
        aux = tree_map_only(Tensor, Tensor.detach, aux)
        return down, loss.detach(), apart(aux, (*parameters, *self.module.buffers()))

    def trace(self, message: Message, arithmetic: Arithmetic) -> list[Tensor | None]:
        """The gradients of the model's output, and nothing else."""
        run, num_values, _ = self._run(message, arithmetic, Call.rerun)
        return _pull_back(run, _parted(run.output)[0])[:num_values]

    def _run(
        self, message: Message, arithmetic: Arithmetic, how: Callable[..., Any]
    ) -> tuple[GraphRun, int, list[Tensor]]:
        """Run the loss with its graph; how many tensors the output has; the loss's parameters."""
        n, flow = message.microbatch, message.flow
        output = (
            flow.value
            if flow.dtype is None
            else tuple(arithmetic.real(each, flow.dtype) for each in flow.value)
        )
        call, tensors = Call.split(self.module, (output, message.target), {})
        values = tensors_of(output)
        needs = [may_need(each) for each in values]
        needs += [False] * (len(tensors) - len(values) - len(call.parameters))
        needs += [each.requires_grad for each in call.parameters]
        randomness = Seeded(self._seed, n, self._index, values[0].device)
        record = Record(call.modules, values[0].device, randomness=randomness)
        found = how(call, tensors, needs, record=record)
        run: GraphRun = found[0] if isinstance(found, tuple) else found
        return run, len(values), call.parameters


def _pull_back(run: GraphRun, loss: Tensor) -> list[Tensor | None]:
    others = len(tensors_of(run.output)) - 1
    return run.pull_back([torch.ones_like(loss), *[None] * others])


def _parted(result: Any) -> tuple[Tensor, Any]:
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    loss, aux = result if is_pair else (result, None)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if isinstance(loss, tuple | list):
            kind = f"a {kind} of {len(loss)}"
        raise UnitError(f"a loss must be one number, or (loss, aux), got {kind}")
    if loss.is_complex():
        raise UnitError(f"a loss must be a real number, got one of {loss.dtype}")
    if not loss.requires_grad:
        raise UnitError(
            f"a loss must have a gradient, and this one, of {loss.dtype}, has none; compute it "
            "from the output without detach, item and comparisons"
        )
    return loss, aux


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self._function(output, target)
