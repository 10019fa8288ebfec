"""A unit at its place in a pipeline: its forward of a new micro-batch, its backward of an old one.

What flows upwards between units is a value: any structure of tensors, or, within a row of
couplings, the stored form of two streams. What flows down is that value again, where the unit below
rebuilds its input from it, and the gradients of the value's tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from redivider.arithmetic import Arithmetic, Checked
from redivider.chain import taken
from redivider.compiled import run_apart
from redivider.coupling import Coupling, Recovered, recover, verify_residual
from redivider.errors import UnitError
from redivider.pipeline.methods import Method, Version
from redivider.pipeline.stages.aliasing import apart
from redivider.pipeline.stages.gradients import accumulate, may_need, widen
from redivider.pipeline.stages.layout import dense
from redivider.pipeline.stages.lookahead import Prediction
from redivider.pipeline.stages.module_state import load_state, state_of
from redivider.pipeline.stages.ring_buffer import Ring
from redivider.pipeline.stages.weights import Weights
from redivider.replay import Call, GraphRun, Record
from redivider.replay.buffers import changes_buffers
from redivider.replay.copies import buffers_to_spend
from redivider.replay.random import Seeded
from redivider.replay.statistics import statistics_untouched
from redivider.row import Keep, prepare_streams
from redivider.tree import tensors_of


@dataclass
class Flow:
    """A value between two units. Streams in stored form have the dtype of their real form."""

    value: Any
    dtype: torch.dtype | None = None


Pull: TypeAlias = Callable[
    [Sequence[Tensor | None]], tuple[list[Tensor | None], list[Tensor | None]]
]


@dataclass
class Kept:
    """What a unit keeps of one micro-batch."""

    record: Record
    value: Any = None
    """Its input: a coupling's first stream, all of it for a junction."""
    dtype: torch.dtype | None = None
    """Of the streams' real form, if the input is streams in stored form."""
    run: GraphRun | None = None
    version: Version = (0, 0)


class Unit:
    """One module of the pipeline.

    Args:
        module: A coupling or a junction.
        index: Its index in the uncut model; random numbers depend on it.
        name: What errors call it.
        method: What is kept, and which weights the backward sees.
        arithmetic: How residuals are added.
        seed: Of the pipeline's random numbers.
        follows: Whether it is fed by a coupling, by a junction, or is the first.
        at_the_end: Whether it lies in the last stage, where the backward follows at once.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        name: str,
        *,
        method: Method,
        arithmetic: Arithmetic,
        seed: int,
        follows: Literal["coupling", "junction", "nothing"],
        at_the_end: bool,
    ) -> None:
        self.module = module
        self.index = index
        self.name = name
        self.is_coupling = isinstance(module, Coupling)
        self.keep: Keep = method.coupling if self.is_coupling else method.junction
        if at_the_end and not self.is_coupling:
            self.keep = "graph"  # it runs once: there is no delay to bridge
        self._inner = module.f if isinstance(module, Coupling) else module
        self._method = method
        self.arithmetic = arithmetic
        self._seed = seed
        self._in_row = follows == "coupling"
        # The unit below rebuilds its input from its output, and needs it from here.
        self._hands_down = follows == "coupling" and method.coupling == "nothing"
        self._needs_grad = follows != "nothing"
        parameters = Call.split(self._inner, (), {})[1]
        if any(is_lazy(each) or each.is_meta for each in parameters):
            raise UnitError(
                f"{name}: its parameters have no values yet, so no optimizer can train them; give "
                "them some first (run a lazy module on a batch, move one off the meta device)"
            )
        stashes = method.weights == "stashed" and not at_the_end
        self.weights = Weights(parameters, stashes=stashes)
        self.kept: dict[int, Kept] = {}
        self._draws: bool | None = None  # random numbers; not known before it has run
        self.ring: Ring | None = None
        """Where inputs are kept in a captured tick, if they are."""
        self.widen = widen

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Those of the module, or of a coupling's function."""
        return self.weights.parameters

    def forward(
        self,
        microbatch: int,
        flow: Flow,
        side: dict[str, Any],
        ahead: Prediction | None = None,
    ) -> Flow:
        """Run the unit on a new micro-batch, by the weights of now, or others in their place."""
        flow = self._enter_row(flow) if self.is_coupling and not self._in_row else flow
        argument = self._argument(flow)
        call, tensors = Call.split(self._inner, (argument,), taken(self.module, side))
        randomness = self._randomness(microbatch, tensors[0].device)
        kept = Kept(self._record(call, randomness, tensors[0].device), dtype=flow.dtype)
        dtype = kept.record.autocast.dtype
        self.weights.learn_casts(dtype, ahead, partial(self._try, call, tensors, microbatch))
        weights, kept.version = self.weights.of_forward(
            dtype, ahead, with_graph=self.keep == "graph"
        )
        tensors = self._with_weights(tensors, weights)
        output = self._run_forward(
            call, tensors, argument, kept, others=weights is not self.parameters
        )
        if self.keep != "nothing":
            value = dense(flow.value[0] if self.is_coupling else flow.value)
            if self.ring is None:
                kept.value = value
            else:
                self.ring.put(value)
        self.kept[microbatch] = kept
        self._draws = bool(self._draws) or randomness.drew
        if not self.is_coupling:
            return Flow(apart(output, (*weights, *self._inner.buffers())))
        a, b = flow.value
        added = self.arithmetic.add(b, verify_residual(output, argument))
        return Flow((self._sound(added, output), a), flow.dtype)

    def backward(
        self, microbatch: int, flow: Flow, grads: Sequence[Tensor | None], side: dict[str, Any]
    ) -> tuple[Flow, list[Tensor | None]]:
        """Run the backward of an old micro-batch, and add to the gradients of the parameters.

        Args:
            microbatch: Which one.
            flow: The unit's output, where the input must be rebuilt from it.
            grads: Of the output's tensors.
            side: The micro-batch's keywords.

        Returns:
            The unit's input, where the unit below must rebuild its own from it, and its gradients.
        """
        kept = self.kept.pop(microbatch)
        if self.ring is not None:
            kept = replace(kept, value=self.ring.take())
        below, grads, own = self._pull(kept, flow, grads, side)
        accumulate(self.parameters, own, self.widen, others=grads)
        self.weights.give_back(kept.version)
        return below, grads

    def evaluate(self, flow: Flow, side: dict[str, Any]) -> Flow:
        """Run the unit by the weights of now, for its output alone."""
        flow = self._enter_row(flow) if self.is_coupling and not self._in_row else flow
        output = self._inner(self._argument(flow), **taken(self.module, side))
        if not self.is_coupling:
            return Flow(output)
        a, b = flow.value
        return Flow((self._sound(self.arithmetic.add(b, output), output), a), flow.dtype)

    def _try(self, call: Call, tensors: Sequence[Tensor], microbatch: int) -> None:
        """Run the unit for nothing: on copies of its buffers, and with its random numbers."""
        randomness = self._randomness(microbatch, tensors[0].device)
        with buffers_to_spend(call.modules), randomness.again(), torch.no_grad():
            call.run_plainly(tensors)

    def _run_forward(
        self, call: Call, tensors: Sequence[Tensor], argument: Any, kept: Kept, *, others: bool
    ) -> Any:
        if self.keep == "graph":
            needs = self._needs(tensors, argument)
            kept.run, _ = call.only_run(tensors, needs, record=kept.record)
            return tree_map_only(Tensor, Tensor.detach, kept.run.output)
        output, _ = call.first_run(
            tensors, with_graph=self.arithmetic.exact, record=kept.record, other_weights=others
        )
        return output

    def trace(
        self, microbatch: int, flow: Flow, side: dict[str, Any], weights: Sequence[Tensor]
    ) -> tuple[Flow, Pull]:
        """Run the unit by some weights as plain autograd would, and leave no trace of it.

        Returns:
            Its output, and a function from the gradients of that to those of its input and of
            these weights.
        """
        flow = self._enter_row(flow) if self.is_coupling and not self._in_row else flow
        argument = self._argument(flow)
        call, tensors = Call.split(self._inner, (argument,), taken(self.module, side))
        tensors = self._with_weights(tensors, weights)
        randomness = self._randomness(microbatch, tensors[0].device)
        kept = Kept(self._record(call, randomness, tensors[0].device, counts="first"))
        kept.run = call.rerun(tensors, self._needs(tensors, argument), kept.record)
        output = tree_map_only(Tensor, Tensor.detach, kept.run.output)
        if self.is_coupling:
            a, b = flow.value
            output = (self._sound(self.arithmetic.add(b, output), output), a)

        leaves = kept.run.leaves

        def pull(grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
            with call.holding(leaves):
                return self._pull(kept, Flow(None), grads, side)[1:]

        return Flow(output, flow.dtype if self.is_coupling else None), pull

    @property
    def changes_buffers(self) -> bool:
        """Whether a run of it, as far as is known, changes buffers beside running statistics."""
        return changes_buffers(self._inner)

    def revive(self, like: Kept, microbatch: int, device: torch.device, value: Any) -> Kept:
        """What is kept of another micro-batch than `like`, and with another value."""
        record = like.record.by(self._randomness(microbatch, device))
        return replace(like, record=record, value=value)

    def state_dict(self) -> dict[str, Any]:
        """Weights and buffers, gradients summed so far, and what is kept of what is in flight."""
        kept = {
            n: {
                "record": each.record.state_dict(),
                "value": each.value,
                "dtype": each.dtype,
                "version": list(each.version),
            }
            for n, each in self.kept.items()
        }
        state = state_of(self.module, self._inner) | {"kept": kept}
        if self.weights.stash:
            state["stash"] = self.weights.stash.state_dict()
        return state

    def load_state_dict(
        self, state: dict[str, Any], sides: dict[int, dict[str, Any]], device: torch.device
    ) -> None:
        """Continue from a state; `sides` are the keywords of the micro-batches in flight."""
        load_state(self.module, state)
        if self.weights.stash:
            users = (tuple(each["version"]) for each in state["kept"].values())
            self.weights.stash.load_state_dict(state["stash"], users)
        self.kept = {
            n: self._restore(n, each, sides[n], device) for n, each in state["kept"].items()
        }

    def _restore(
        self, microbatch: int, state: dict[str, Any], side: dict[str, Any], device: torch.device
    ) -> Kept:
        flow = Flow(state["value"], state["dtype"])
        if self.is_coupling:
            flow.value = (flow.value, None)
        # A unit that keeps nothing has no argument to show: its call is split without one.
        args: tuple[Any, ...] = () if state["value"] is None else (self._argument(flow),)
        call, tensors = Call.split(self._inner, args, taken(self.module, side))
        record = self._record(call, self._randomness(microbatch, device), device)
        record.load_state_dict(state["record"])
        kept = Kept(record, state["value"], state["dtype"], version=tuple(state["version"]))
        if self.keep == "graph":
            tensors = self._with_weights(tensors, self._backward_weights(kept))
            kept.run = call.rerun(tensors, self._needs(tensors, args[0]), record)
        return kept

    def _pull(
        self, kept: Kept, flow: Flow, grads: Sequence[Tensor | None], side: dict[str, Any]
    ) -> tuple[Flow, list[Tensor | None], list[Tensor | None]]:
        """The input, where it is rebuilt; its gradients; those of the parameters."""
        pull = self._pull_coupling if self.is_coupling else self._pull_junction
        below, found, num_values = pull(kept, flow, grads, side)
        return below, found[:num_values], found[len(found) - len(self.parameters) :]

    def _pull_coupling(
        self, kept: Kept, flow: Flow, grads: Sequence[Tensor | None], side: dict[str, Any]
    ) -> tuple[Flow, list[Tensor | None], int]:
        dc, da = grads
        if kept.run is not None:
            with self._with_weights_of(kept.run):
                return Flow(None), Recovered(None, kept.run).pull_back(dc, da), 2
        assert kept.dtype is not None
        c, a = flow.value if self.keep == "nothing" else (None, kept.value)
        real = self.arithmetic.real(a, kept.dtype)
        call, tensors = Call.split(self._inner, (real,), taken(self.module, side))
        b = None
        if not self._hands_down:
            c = None  # the junction below has kept what it needs
        elif c is not None and self._inverts_by_other_weights(kept):
            b, c = self._invert(call, c, tensors, kept), None
        tensors = self._with_weights(tensors, self._backward_weights(kept))
        recovered = recover(
            call, c, tensors, self._needs(tensors, real), kept.record, self.arithmetic
        )
        if self.arithmetic.exact and recovered.b is not None:
            self._verify_exact(recovered.b, recovered.run)
        b = recovered.b if b is None else b
        below = Flow(None) if b is None else Flow((a, b), kept.dtype)
        with self._with_weights_of(recovered.run):
            return below, recovered.pull_back(dc, da), 2

    def _pull_junction(
        self, kept: Kept, flow: Flow, grads: Sequence[Tensor | None], side: dict[str, Any]
    ) -> tuple[Flow, list[Tensor | None], int]:
        run = kept.run
        argument = self._argument(Flow(kept.value, kept.dtype)) if run is None else None
        if run is None:
            call, tensors = Call.split(self._inner, (argument,), taken(self.module, side))
            tensors = self._with_weights(tensors, self._backward_weights(kept))
            # A compiled module draws others when it is run apart from its outputs.
            apart = run_apart(self._inner, grads) if self._draws is False else None
            run = call.rerun(tensors, self._needs(tensors, argument), kept.record, apart)
        below = Flow(kept.value, kept.dtype) if self._hands_down else Flow(None)
        num_values = len(run.leaves) - len(self.parameters) - _num_tensors(taken(self.module, side))
        with self._with_weights_of(run):
            return below, run.pull_back(grads), num_values

    def _enter_row(self, flow: Flow) -> Flow:
        streams = prepare_streams(flow.value)
        a, b = (self._sound(self.arithmetic.store(each), each) for each in streams)
        return Flow((a, b), streams[0].dtype)

    def _argument(self, flow: Flow) -> Any:
        """What the module is given: the first stream, both, or whatever the value is."""
        if flow.dtype is None:
            return flow.value
        if self.is_coupling:
            return self.arithmetic.real(flow.value[0], flow.dtype).requires_grad_()
        return tuple(self.arithmetic.real(each, flow.dtype) for each in flow.value)

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
        return Seeded(self._seed, microbatch, self.index, device)

    def _needs(self, tensors: Sequence[Tensor], argument: Any) -> list[bool]:
        """Which tensors of a call need a gradient: argument and parameters, not side inputs."""
        values = [self._needs_grad and may_need(each) for each in tensors_of(argument)]
        num_side = len(tensors) - len(values) - len(self.parameters)
        return [*values, *[False] * num_side, *(each.requires_grad for each in self.parameters)]

    def _with_weights(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        return [*tensors[: len(tensors) - len(weights)], *weights]

    def _backward_weights(self, kept: Kept) -> Sequence[Tensor]:
        return self.weights.of_backward(kept.version, kept.record.autocast.dtype)

    def _inverts_by_other_weights(self, kept: Kept) -> bool:
        if self.weights.stash is None or self._method.inverse == self._method.weights:
            return False
        return kept.version != self.weights.stash.version

    def _invert(self, call: Call, c: Tensor, tensors: Sequence[Tensor], kept: Kept) -> Tensor:
        with statistics_untouched(call.modules):
            run = call.rerun(tensors, [False] * len(tensors), kept.record)
        b = self.arithmetic.subtract(c, run.output)
        if self.arithmetic.exact:
            self._verify_exact(b, run)
        return b

    def _verify_exact(self, b: Tensor, run: GraphRun) -> None:
        """By other weights than the forward's, a stream may leave the range on its way back."""
        self._sound(self.arithmetic.add(b, run.output), run.output)

    def _with_weights_of(self, run: GraphRun) -> AbstractContextManager[None]:
        """Have the module hold the weights of a run that was by others than those of now.

        What `torch.utils.checkpoint` left out of the graph is computed again in the backward.
        """
        if self.weights.stash is None:
            return nullcontext()
        return Call.split(self._inner, (), {})[0].holding(run.leaves)

    def _sound(self, checked: Checked, x: Tensor) -> Tensor:
        if checked.fault is not None and checked.fault:
            what = "a stream left the range of" if torch.isfinite(x).all() else "f is not finite on"
            raise OverflowError(f"{self.name}: {what} {self.arithmetic}")
        return checked.stored


def _num_tensors(tree: Any) -> int:
    return len(tensors_of(tree))
