"""A unit at its place in a pipeline: its forward of a new micro-batch, its backward of an old one.

          flow up                      flow down, gradients
             |                                  |
    forward: run by current weights    backward: rebuild or fetch the input, run by the weights of
             keep what the method says           the method with a graph, pull the gradients back
             |                                  |
          flow up                      flow down, gradients

Between units of a row of couplings the flow is the stored form of two streams. Downwards, the flow
is needed only where the unit below rebuilds its input from it. A coupling and a junction differ in
what they compute and in what they can rebuild: coupling_unit.py, junction_unit.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from redivider.arithmetic import Arithmetic
from redivider.backward.strategy import Keep
from redivider.chain import taken
from redivider.errors import UnitError
from redivider.pipeline.methods import Method
from redivider.pipeline.stages.gradients import accumulate, is_differentiable, widen
from redivider.pipeline.stages.lookahead import Prediction
from redivider.pipeline.stages.message import Flow
from redivider.pipeline.stages.module_state import load_state, state_of
from redivider.pipeline.stages.ring_buffer import Ring
from redivider.pipeline.stages.stash import Version
from redivider.pipeline.stages.weights import Weights
from redivider.replay import Call, GraphRun, Record
from redivider.replay.buffers import changes_buffers
from redivider.replay.copies import buffers_to_spend
from redivider.replay.seeded import Seeded
from redivider.strides import dense
from redivider.tree import map_tensors, tensors_of

Grads: TypeAlias = Sequence[Tensor | None]
LaterGrads: TypeAlias = Callable[[], list[Tensor | None]]
PullBack: TypeAlias = Callable[[Grads], tuple[list[Tensor | None], list[Tensor | None]]]


@dataclass(frozen=True)
class Place:
    """Position of a unit in a pipeline, and what it needs to know of it.

    Args:
        index: Index in the uncut model; random numbers depend on it.
        name: Name in error messages.
        method: What is kept, and which weights the backward uses.
        seed: Seed of the pipeline's random numbers.
        follows: Kind of the unit below.
        in_last_stage: Whether the backward follows the forward at once.
    """

    index: int
    name: str
    method: Method
    seed: int
    follows: Literal["coupling", "junction", "nothing"]
    in_last_stage: bool

    @property
    def hands_down(self) -> bool:
        """Whether the unit below rebuilds its input from its output, and needs it from here."""
        return self.follows == "coupling" and self.method.coupling == "nothing"


@dataclass
class Kept:
    """State that a unit keeps for one micro-batch between its forward and its backward."""

    record: Record
    value: Any = None
    """Input: a coupling's first stream, or a junction's whole value."""
    dtype: torch.dtype | None = None
    """Real dtype of the streams, if the input is streams in stored form."""
    run: GraphRun | None = None
    version: Version = (0, 0)


class Unit(ABC):
    """One module of the pipeline.

    Args:
        module: The caller's coupling or junction.
        inner: The module that is evaluated: a coupling's f, or the junction itself.
        keep: What is kept between forward and backward.
        place: Position in the pipeline.
        arithmetic: Arithmetic that adds residuals.
    """

    def __init__(
        self, module: nn.Module, inner: nn.Module, keep: Keep, place: Place, arithmetic: Arithmetic
    ) -> None:
        self.module = module
        self.name = place.name
        self.keep = keep
        self.arithmetic = arithmetic
        self._inner, self._place = inner, place
        parameters = Call.split(inner, (), {})[1]
        if any(is_lazy(param) or param.is_meta for param in parameters):
            raise UnitError(
                f"{self.name}: its parameters have no values yet, so no optimizer can train them; "
                "give them some first (run a lazy module on a batch, move one off the meta device)"
            )
        stashes = place.method.weights == "stashed" and not place.in_last_stage
        self.weights = Weights(parameters, stashes=stashes)
        self.kept: dict[int, Kept] = {}
        self._draws: bool | None = None  # random numbers; unknown before the first run
        self.ring: Ring | None = None
        """Ring buffer of kept inputs, in a captured tick."""
        self.widen = widen

    @abstractmethod
    def _enter(self, flow: Flow) -> Flow:
        """Return the flow in the form in which this unit works."""

    @abstractmethod
    def _argument(self, flow: Flow) -> Any:
        """Return the argument of the inner module."""

    @abstractmethod
    def _result(
        self, flow: Flow, argument: Any, output: Any, weights: Sequence[Tensor] | None = None
    ) -> Flow:
        """Return the flow to the next unit, from this unit's flow and its inner module's call.

        `weights`, set in training, are those of the run: the flow must outlive their update.
        """

    @abstractmethod
    def _input_to_keep(self, flow: Flow) -> Any:
        """Return the part of the input that a backward needs."""

    @abstractmethod
    def _flow_of_kept(self, value: Any, dtype: torch.dtype | None) -> Flow:
        """Return a flow from the part of the input that was kept."""

    @abstractmethod
    def _run_backward(
        self, kept: Kept, flow: Flow, grads: Grads, side: dict[str, Any], *, is_split: bool
    ) -> tuple[Flow, list[Tensor | None], LaterGrads]:
        """Return the flow down, the gradients of the input, and a function for those of the rest.

        With `is_split` that function computes them.
        """

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters of the inner module."""
        return self.weights.parameters

    @property
    def changes_buffers(self) -> bool:
        """Whether a run is known to change buffers other than running statistics."""
        return changes_buffers(self._inner)

    def forward(
        self, microbatch: int, flow: Flow, side: dict[str, Any], ahead: Prediction | None = None
    ) -> Flow:
        """Run the unit on a new micro-batch, by the current weights or by predicted ones."""
        flow = self._enter(flow)
        argument = self._argument(flow)
        call, tensors = self._split((argument,), side)
        device = tensors[0].device
        randomness = self._randomness(microbatch, device)
        kept = Kept(self._record(call, randomness, device), dtype=flow.dtype)
        dtype = kept.record.autocast.dtype
        self.weights.learn_casts(dtype, ahead, partial(self._dry_run, call, tensors, microbatch))
        weights, kept.version = self.weights.of_forward(
            dtype, ahead, with_graph=self.keep == "graph"
        )
        self.kept[microbatch] = kept
        tensors = self._with_weights(tensors, weights)
        if self.keep == "graph":
            needs = self._needs(tensors, argument)
            kept.run, _ = call.only_run(tensors, needs, record=kept.record)
            output = map_tensors(Tensor.detach, kept.run.output)
        else:
            output, _ = call.first_run(
                tensors,
                with_graph=self.arithmetic.exact,
                record=kept.record,
                other_weights=weights is not self.parameters,
            )
        if self.keep != "nothing":
            value = dense(self._input_to_keep(flow))
            if self.ring is None:
                kept.value = value
            else:
                self.ring.put(value)
        self._draws = bool(self._draws) or randomness.drew
        return self._result(flow, argument, output, weights)

    def backward(
        self,
        microbatch: int,
        flow: Flow,
        grads: Grads,
        side: dict[str, Any],
        postponed: list[Callable[[], None]] | None = None,
    ) -> tuple[Flow, list[Tensor | None]]:
        """Run the backward of an old micro-batch, and add to the gradients of the parameters.

        Args:
            microbatch: Its index.
            flow: The unit's output, where the input must be rebuilt from it.
            grads: Gradients of the output's tensors.
            side: The micro-batch's keywords.
            postponed: List to which to add the work on the parameters; None to do it now.

        Returns:
            The unit's input, where the unit below must rebuild its own from it, and its gradients.
        """
        kept = self.kept.pop(microbatch)
        if self.ring is not None:
            kept = replace(kept, value=self.ring.take())
        # A unit that stashes weights holds those of this micro-batch only during this call.
        is_split = postponed is not None and self.weights.stash is None
        below, input_grads, others = self._run_backward(kept, flow, grads, side, is_split=is_split)

        def finish() -> None:
            own_grads = self._parameter_grads(others())
            accumulate(self.parameters, own_grads, self.widen, others=input_grads)
            self.weights.give_back(kept.version)

        if postponed is None:
            finish()
        else:
            postponed.append(finish)
        return below, input_grads

    def drop(self, microbatch: int) -> None:
        """Forget a micro-batch whose forward has failed in this stage."""
        kept = self.kept.pop(microbatch, None)
        if kept is not None:
            self.weights.give_back(kept.version)

    def evaluate(self, flow: Flow, side: dict[str, Any]) -> Flow:
        """Run the unit by the current weights, without a backward."""
        flow = self._enter(flow)
        argument = self._argument(flow)
        return self._result(flow, argument, self._inner(argument, **taken(self.module, side)))

    def trace(
        self, microbatch: int, flow: Flow, side: dict[str, Any], weights: Sequence[Tensor]
    ) -> tuple[Flow, PullBack]:
        """Run the unit by these weights as plain autograd would, without side effects.

        Returns:
            The output, and a function from its gradients to those of the input and of `weights`.
        """
        flow = self._enter(flow)
        argument = self._argument(flow)
        call, tensors = self._split((argument,), side)
        tensors = self._with_weights(tensors, weights)
        device = tensors[0].device
        randomness = self._randomness(microbatch, device)
        kept = Kept(self._record(call, randomness, device, counts="first"))
        kept.run = call.rerun(tensors, self._needs(tensors, argument), kept.record)
        leaves = kept.run.leaves

        def pull_back(grads: Grads) -> tuple[list[Tensor | None], list[Tensor | None]]:
            with call.holding(leaves):
                _, input_grads, others = self._run_backward(
                    kept, Flow(None), grads, side, is_split=False
                )
            return input_grads, self._parameter_grads(others())

        return self._result(flow, argument, map_tensors(Tensor.detach, kept.run.output)), pull_back

    def revive(self, like: Kept, microbatch: int, device: torch.device, value: Any) -> Kept:
        """Return the state of another micro-batch than `like`, with another value."""
        record = like.record.by(self._randomness(microbatch, device))
        return replace(like, record=record, value=value)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, buffers, summed gradients, and what is kept of micro-batches in flight.

        A graph is not saved: it is built again from the kept input.
        """
        kept = {
            microbatch: {
                "record": entry.record.state_dict(),
                "value": entry.value,
                "dtype": entry.dtype,
                "version": list(entry.version),
            }
            for microbatch, entry in self.kept.items()
        }
        state = state_of(self.module, self._inner) | {"kept": kept}
        if self.weights.stash:
            state["stash"] = self.weights.stash.state_dict()
        return state

    def load_state_dict(
        self, state: dict[str, Any], sides: dict[int, dict[str, Any]], device: torch.device
    ) -> None:
        """Resume from a state; `sides` holds the keywords of the micro-batches in flight."""
        load_state(self.module, state)
        if self.weights.stash:
            users = (tuple(entry["version"]) for entry in state["kept"].values())
            self.weights.stash.load_state_dict(state["stash"], users)
        self.kept = {
            microbatch: self._restore(microbatch, entry, sides[microbatch], device)
            for microbatch, entry in state["kept"].items()
        }

    def _restore(
        self, microbatch: int, state: dict[str, Any], side: dict[str, Any], device: torch.device
    ) -> Kept:
        value, dtype = state["value"], state["dtype"]
        # Where no input is kept, the call is split without an argument: only its modules matter.
        args: tuple[Any, ...] = (
            () if value is None else (self._argument(self._flow_of_kept(value, dtype)),)
        )
        call, tensors = self._split(args, side)
        record = self._record(call, self._randomness(microbatch, device), device)
        record.load_state_dict(state["record"])
        kept = Kept(record, value, dtype, version=tuple(state["version"]))
        if self.keep == "graph":
            tensors = self._with_weights(tensors, self._backward_weights(kept))
            kept.run = call.rerun(tensors, self._needs(tensors, args[0]), record)
        return kept

    def _split(self, args: tuple[Any, ...], side: dict[str, Any]) -> tuple[Call, list[Tensor]]:
        return Call.split(self._inner, args, taken(self.module, side))

    def _dry_run(self, call: Call, tensors: Sequence[Tensor], microbatch: int) -> None:
        """Run the unit on copies of its buffers, with the random numbers of the micro-batch."""
        randomness = self._randomness(microbatch, tensors[0].device)
        with buffers_to_spend(call.modules), randomness.again(), torch.no_grad():
            call.run_plainly(tensors)

    def _record(
        self,
        call: Call,
        randomness: Seeded,
        device: torch.device,
        counts: Literal["first", "again"] | None = None,
    ) -> Record:
        counts = counts or ("first" if self.keep == "graph" else "again")
        return Record(call.modules, device, randomness=randomness, counts=counts)

    def _randomness(self, microbatch: int, device: torch.device) -> Seeded:
        return Seeded(self._place.seed, microbatch, self._place.index, device)

    def _needs(self, tensors: Sequence[Tensor], argument: Any) -> list[bool]:
        """Return which tensors of a call need a gradient: argument and parameters, not keywords."""
        is_first = self._place.follows == "nothing"
        values = [is_differentiable(tensor) and not is_first for tensor in tensors_of(argument)]
        num_side = len(tensors) - len(values) - len(self.parameters)
        return [*values, *[False] * num_side, *(param.requires_grad for param in self.parameters)]

    def _with_weights(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        return [*tensors[: len(tensors) - len(weights)], *weights]

    def _backward_weights(self, kept: Kept) -> Sequence[Tensor]:
        return self.weights.of_backward(kept.version, kept.record.autocast.dtype)

    def _parameter_grads(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the parameters, which come last."""
        return grads[len(grads) - len(self.parameters) :]

    def _holding_weights_of(self, run: GraphRun) -> AbstractContextManager[None]:
        """Let the module hold the weights of a run, if they may be old ones.

        What `torch.utils.checkpoint` left out of the graph is recomputed in the backward.
        """
        if self.weights.stash is None:
            return nullcontext()
        return Call.split(self._inner, (), {})[0].holding(run.leaves)
