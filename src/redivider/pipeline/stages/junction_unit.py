"""A junction in a pipeline: any module. Its input cannot be rebuilt, so it is kept."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redivider._torch_private import compiled_call
from redivider.arithmetic import Arithmetic
from redivider.backward.strategy import Keep
from redivider.chain import taken
from redivider.pipeline.stages.aliasing import unaliased
from redivider.pipeline.stages.message import Flow
from redivider.pipeline.stages.split_backward import pull_back_first
from redivider.pipeline.stages.unit import Grads, Kept, LaterGrads, Place, Unit
from redivider.tree import tensors_of


class JunctionUnit(Unit):
    """A module that is not a coupling."""

    def __init__(self, module: nn.Module, place: Place, arithmetic: Arithmetic) -> None:
        # In the last stage there is no delay to bridge, so it runs once, with its graph.
        keep: Keep = "graph" if place.in_last_stage else place.method.junction
        super().__init__(module, module, keep, place, arithmetic)

    def _enter(self, flow: Flow) -> Flow:
        return flow

    def _argument(self, flow: Flow) -> Any:
        return flow.real(self.arithmetic)

    def _result(
        self, flow: Flow, argument: Any, output: Any, weights: Sequence[Tensor] | None = None
    ) -> Flow:
        if weights is None:
            return Flow(output)
        return Flow(unaliased(output, (*weights, *self._inner.buffers())))

    def _input_to_keep(self, flow: Flow) -> Any:
        return flow.value

    def _flow_of_kept(self, value: Any, dtype: torch.dtype | None) -> Flow:
        return Flow(value, dtype)

    def _run_backward(
        self, kept: Kept, flow: Flow, grads: Grads, side: dict[str, Any], *, is_split: bool
    ) -> tuple[Flow, list[Tensor | None], LaterGrads]:
        run, own_input = kept.run, self._flow_of_kept(kept.value, kept.dtype)
        if run is None:
            argument = self._argument(own_input)
            call, tensors = self._split((argument,), side)
            tensors = self._with_weights(tensors, self._backward_weights(kept))
            # A compiled module that is run apart from its outputs draws other random numbers.
            evaluate = _run_apart(self._inner, grads) if self._draws is False else None
            run = call.rerun(tensors, self._needs(tensors, argument), kept.record, evaluate)
        num_side = len(tensors_of(taken(self.module, side)))
        num_inputs = len(run.leaves) - len(self.parameters) - num_side
        below = own_input if self._place.hands_down else Flow(None)
        with self._holding_weights_of(run):
            if is_split:
                return below, *pull_back_first(run, grads, num_inputs)
            all_grads = run.pull_back(grads)
            return below, all_grads[:num_inputs], lambda: all_grads[num_inputs:]


def _run_apart(module: nn.Module, grads: Sequence[Tensor | None]) -> Callable[..., Any] | None:
    """Return the call that runs a compiled module for its graph alone, if there is one.

    It needs the gradients of all outputs, whose dtypes the stand-ins take.
    """
    run = getattr(compiled_call(module), "run_apart", None)
    if run is None or any(grad is None for grad in grads):
        return None
    return partial(run, tuple(grad.dtype for grad in grads if grad is not None))
