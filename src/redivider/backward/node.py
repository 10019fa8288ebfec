"""A unit as one autograd node that keeps less than its graph.

Between forward and backward such a node keeps its input, or nothing, and in the backward it runs
its module again. Parameters are real inputs of the node and their gradients real outputs, so that
frozen stems, `torch.autograd.grad`, hooks, DDP and FSDP2 work as with a plain module.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from redivider.backward.mailbox import Mailbox
from redivider.errors import ChangedError, UnitError, naming
from redivider.replay import Call, Record
from redivider.replay.call import GraphRun
from redivider.tree import tensors_of

if TYPE_CHECKING:
    from redivider.backward.early_stop import EmptiedGraph
    from redivider.backward.overlap import Overlap
    from redivider.backward.saving import Saving
    from redivider.backward.strategy import Keeping


class Kept(ABC):
    """State that one unit keeps between its forward and its backward."""

    name: str
    """Index and name of the unit, for errors."""
    ahead: "Overlap | None" = None
    """Scheduler that prepares units before their turn, if there is one."""
    saving: "Saving | None" = None
    """Outputs of operations that are not run again, if there are any."""
    is_compiled = False
    """True if the module that runs again is compiled, into one autograd node."""

    @abstractmethod
    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Compute the outputs; return them and the tensors to save for the backward."""

    @abstractmethod
    def prepare(self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool) -> Any:
        """Run the unit again in the backward, as far as that needs no gradient.

        Args:
            saved: The saved tensors.
            needs: Flags of the inputs that need a gradient.
            flows: True if a gradient will flow through the unit's module.
        """

    @abstractmethod
    def finish(
        self, prepared: Any, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs from those of the outputs."""

    def flows(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether these gradients of the outputs flow through the unit's module."""
        return any(grad is not None for grad in grads)

    def precedes(self, other: "Kept") -> bool:
        """Return whether it can be prepared as soon as the other one is."""
        return self.ahead is not None and self.ahead is other.ahead

    def take(self) -> list[Tensor]:
        """Return the outputs of operations to save, after the first run."""
        return [] if self.saving is None else self.saving.take()

    def again(self, outputs: Sequence[Tensor]) -> Callable[..., Any] | None:
        """Return a function that runs the module again, if not the module itself."""
        return None if self.saving is None else self.saving.replay(outputs)

    def apply(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the unit as a node of the caller's graph."""
        outputs: tuple[Tensor, ...] = _Node.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return outputs


_TENSOR = object()  # marks the place of a tensor in an output


class KeptInput(Kept):
    """State of a module that keeps its arguments and runs again from them."""

    returns_others = False
    """True if the output may have other things in it than tensors."""

    def __init__(self, name: str, call: Call, *, with_graph: bool) -> None:
        self.name = name
        self.is_compiled = call.is_compiled
        call.name = name
        self._call = call
        self._with_graph = with_graph
        self._record: Record
        self._graph: EmptiedGraph | None = None
        self._leaves: list[Any]  # of the output, without its tensors
        self._spec: TreeSpec

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if self.ahead is None:
            from redivider.backward.early_stop import first_run

            result, self._record, self._graph = first_run(
                self._call, tensors, with_graph=self._with_graph
            )
        else:
            result, self._record = self._call.first_run(tensors, with_graph=self._with_graph)
        return self.split_output(result), (*tensors, *self.take())

    def split_output(self, output: Any) -> Sequence[Tensor]:
        """Return the tensors of an output, and remember how they make it up."""
        leaves, self._spec = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) < len(leaves) and not self.returns_others:
            kind = type(self._call.module).__name__
            raise UnitError(f"{kind} must return tensors, got {type(output).__name__}")
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tensors

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the module as a node of the caller's graph, and return its output."""
        outputs = iter(self.apply(tensors))
        leaves = [next(outputs) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        if not flows:
            return None
        tensors, run = saved[: len(needs)], self.again(saved[len(needs) :])
        if self._graph and self._graph.fill(self._call, tensors, needs, self._record, run):
            return self._graph
        return self._call.rerun(tensors, needs, self._record, run)

    def finish(
        self, prepared: GraphRun | None, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        return [None] * len(needs) if prepared is None else prepared.pull_back(grads)


class Keeper(Protocol):
    """Keeper of inputs of units elsewhere than in the graph."""

    def make_kept(self, name: str, call: Call, *, with_graph: bool, num_inputs: int) -> KeptInput:
        """Return the state of a module whose first tensors are its inputs."""

    def skip(self) -> None:
        """Note that a unit has run whose inputs something else keeps."""

    def report_to(self, mailbox: Mailbox) -> None:
        """Warn, through a mailbox, of inputs that will not be those of the forward."""


def keep_input(
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keeping: "Keeping",
    *,
    exact: bool,
) -> Any:
    """Run a module so that it keeps its arguments and no graph.

    Args:
        name: Index and name of the unit, for errors.
        module: The module.
        args: Its arguments.
        kwargs: Its keywords.
        keeping: State that it keeps.
        exact: Use the same kernels in both runs, so that they give the same bits.
    """
    call, tensors = Call.split(module, args, kwargs)
    if keeping.keeper is None:
        kept = KeptInput(name, call, with_graph=exact)
    else:
        num_inputs = len(tensors_of(args))
        kept = keeping.keeper.make_kept(name, call, with_graph=exact, num_inputs=num_inputs)
    kept.ahead, kept.saving = keeping.ahead, keeping.saving and keeping.saving(call)
    return kept.run(tensors)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = kept.forward(tensors)
        ctx.kept = kept
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.kept.name}: create_graph=True needs the graph that this unit did not keep; "
                'for gradients of gradients use backward="store", or, where blocks were made '
                "reversible, rd.make_plain(model)"
            )
        kept, job = ctx.kept, _Job(ctx)
        if kept.ahead is None:
            return None, *job.finish(job.prepare(flows=kept.flows(grads)), grads)
        return None, *kept.ahead.step(job, grads)


class _Job:
    """The backward of a node, in two parts that can run apart (see `overlap.Job`)."""

    def __init__(self, ctx: Any) -> None:
        self.key = ctx.kept
        self._ctx = ctx
        self._needs = ctx.needs_input_grad[1:]
        self._unpacked: Sequence[Tensor] | None = None

    @property
    def is_compiled(self) -> bool:
        return bool(self.key.is_compiled)

    @property
    def has_before(self) -> bool:
        return self._node_before() is not None

    def before(self) -> "_Job | None":
        node = self._node_before()
        job = None if node is None else _Job(node)
        return job if job is not None and job._is_available() else None

    def _node_before(self) -> Any:
        """Return the node of the unit that the backward reaches next, if it is near."""
        from redivider.backward.graph import find_unit  # overlap alone needs it

        node = find_unit(self._ctx)
        return node if node is not None and node.kept.precedes(self.key) else None

    def prepare(self, *, flows: bool = True) -> Any:
        with naming(self.key.name):
            saved, self._unpacked = self._saved(), None
            return self.key.prepare(saved, self._needs, flows=flows)

    def _saved(self) -> Sequence[Tensor]:
        """Return the saved tensors; hooks, as of torch's checkpoint, may unpack them only once."""
        if self._unpacked is None:
            self._unpacked = _saved(self._ctx)
        return self._unpacked

    def _is_available(self) -> bool:
        """Return whether the saved tensors can be used before the node's turn.

        They cannot if one has changed, which is an error only when the node's turn comes, or if
        FSDP has freed a parameter, which it gathers again when the node's turn comes.
        """
        try:
            saved = self._saved()
        except (ChangedError, RuntimeError):
            return False
        return all(tensor.untyped_storage().size() or not tensor.numel() for tensor in saved)

    def is_bound(self, prepared: Any) -> bool:
        return prepared is not None and not prepared.is_free

    def finish(self, prepared: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        with naming(self.key.name):
            input_grads: list[Tensor | None] = self.key.finish(prepared, self._needs, grads)
            return input_grads


def _saved(ctx: Any) -> Sequence[Tensor]:
    try:
        saved: Sequence[Tensor] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise ChangedError(
            "its weights, arguments or output changed between the forward and the backward, which "
            "runs it again and needs them as they were (step the optimizer after the backward): "
            f"{str(error).partition(' Hint:')[0]}"
        ) from None
    return saved
