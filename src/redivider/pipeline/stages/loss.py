"""Loss at the end of a pipeline: its forward and its gradient in one action."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from redivider.arithmetic import Arithmetic
from redivider.errors import UnitError
from redivider.pipeline.stages.aliasing import unaliased
from redivider.pipeline.stages.gradients import accumulate, is_differentiable
from redivider.pipeline.stages.message import Flow, Message
from redivider.pipeline.stages.module_state import load_state, state_of
from redivider.pipeline.stages.stage import Stage
from redivider.replay import Call, GraphRun, Record
from redivider.replay.seeded import Seeded
from redivider.tree import map_tensors, tensors_of


class Loss:
    """Function or module of (output, target) that returns a loss, or (loss, aux).

    Args:
        function: The caller's function or module.
        index: Index behind all units; random numbers depend on it.
        seed: Seed of the pipeline's random numbers.
    """

    def __init__(self, function: Callable[..., Any], index: int, seed: int) -> None:
        self.module = function if isinstance(function, nn.Module) else _Function(function)
        self._index = index
        self._seed = seed

    def attach_to(self, stage: Stage) -> None:
        """Add the loss to the last stage's module, so that its optimizer trains the parameters."""
        if any(True for _ in self.module.parameters()):
            if "loss" in stage.module._modules:
                raise ValueError(
                    "a unit of the last stage is called 'loss', as is the loss, which has "
                    "parameters too; give the unit another name"
                )
            stage.module.add_module("loss", self.module)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, buffers, and the gradients summed so far."""
        return state_of(self.module, self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        load_state(self.module, state)

    def run(
        self, message: Message, arithmetic: Arithmetic, guard: Callable[[Tensor, int], None]
    ) -> tuple[Message, Tensor, Any]:
        """Compute the loss of the model's output and its gradients.

        Args:
            message: The model's output and the target.
            arithmetic: Arithmetic of the streams.
            guard: Called with the loss and the micro-batch, before the gradients are computed.

        Returns:
            A message downwards with the gradients of the output, the loss, and aux.
        """
        run, num_values, parameters = self._run(message, arithmetic, Call.only_run)
        loss, aux = _split_result(run.output)
        n, flow = message.microbatch, message.flow
        guard(loss, n)
        grads = _pull_back(run, loss)
        own = grads[len(grads) - len(parameters) :]
        accumulate(parameters, own, others=grads[:num_values])
        below = flow if flow.dtype is not None else Flow(None)
        down = Message(n, below, message.autocast, message.side, grads=grads[:num_values])
        aux = map_tensors(Tensor.detach, aux)
        return down, loss.detach(), unaliased(aux, (*parameters, *self.module.buffers()))

    def trace(self, message: Message, arithmetic: Arithmetic) -> list[Tensor | None]:
        """Return the gradients of the model's output, without side effects."""
        run, num_values, _ = self._run(message, arithmetic, Call.rerun)
        return _pull_back(run, _split_result(run.output)[0])[:num_values]

    def _run(
        self, message: Message, arithmetic: Arithmetic, evaluate: Callable[..., Any]
    ) -> tuple[GraphRun, int, list[Tensor]]:
        """Run the loss with its graph, by a method of `Call`.

        Returns:
            The run, the number of tensors of the model's output, and the loss's parameters.
        """
        output = message.flow.real(arithmetic)
        call, tensors = Call.split(self.module, (output, message.target), {})
        values = tensors_of(output)
        needs = [is_differentiable(value) for value in values]
        needs += [False] * (len(tensors) - len(values) - len(call.parameters))
        needs += [parameter.requires_grad for parameter in call.parameters]
        randomness = Seeded(self._seed, message.microbatch, self._index, values[0].device)
        record = Record(call.modules, values[0].device, randomness=randomness)
        result = evaluate(call, tensors, needs, record=record)
        run: GraphRun = result[0] if isinstance(result, tuple) else result
        return run, len(values), call.parameters


def _pull_back(run: GraphRun, loss: Tensor) -> list[Tensor | None]:
    num_aux = len(tensors_of(run.output)) - 1  # these have no gradient
    return run.pull_back([torch.ones_like(loss), *[None] * num_aux])


def _split_result(result: Any) -> tuple[Tensor, Any]:
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
    """Module of a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self._function(output, target)
