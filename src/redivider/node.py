"""A unit as one autograd node that keeps less than its graph.

Between forward and backward such a node keeps its input, or nothing, and in the backward it runs
its module again. Parameters are real inputs of the node and their gradients real outputs, so that
frozen stems, `torch.autograd.grad`, hooks, DDP and FSDP2 see what they see of a plain module.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from redivider.errors import ChangedError, UnitError, naming
from redivider.overlap import Overlap
from redivider.replay import Call, Record
from redivider.replay.call import GraphRun


class Kept(ABC):
    """What one unit keeps between its forward and its backward."""

    name: str
    """The unit's index and name, for errors."""
    ahead: Overlap | None = None
    """What prepares units before their turn, if anything does."""
    is_compiled = False
    """Whether what it runs again is one node of the compiler's."""

    @abstractmethod
    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Compute the outputs; return them and the tensors to save for the backward."""

    @abstractmethod
    def prepare(self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool) -> Any:
        """In the backward: run the unit again, as far as that needs no gradient.

        Args:
            saved: The saved tensors.
            needs: Which inputs want a gradient.
            flows: Whether a gradient will come that flows through the unit's module.
        """

    @abstractmethod
    def finish(
        self, prepared: Any, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Turn the outputs' gradients into those of the inputs."""

    def flows(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether these gradients of the outputs flow through the unit's module."""
        return any(grad is not None for grad in grads)

    def precedes(self, other: "Kept") -> bool:
        """Whether it can be prepared as soon as the other one is."""
        return self.ahead is not None and self.ahead is other.ahead

    def apply(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the unit as a node of the caller's graph."""
        outputs: tuple[Tensor, ...] = _Node.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return outputs


class KeptInput(Kept):
    """A module that keeps its arguments, and is run again from them."""

    def __init__(self, name: str, call: Call, *, with_graph: bool) -> None:
        self.name = name
        self.is_compiled = call.is_compiled
        self._call = call
        self._with_graph = with_graph
        self._record: Record
        self.spec: TreeSpec

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        output, self._record = self._call.first_run(tensors, with_graph=self._with_graph)
        outputs, self.spec = tree_flatten(output)
        if not all(isinstance(each, Tensor) for each in outputs):
            kind = type(self._call.module).__name__
            raise UnitError(f"{kind} must return tensors, got {type(output).__name__}")
        return outputs, tensors

    def prepare(
        self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool
    ) -> GraphRun | None:
        return self._call.rerun(saved, needs, self._record) if flows else None

    def finish(
        self, prepared: GraphRun | None, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        return [None] * len(needs) if prepared is None else prepared.pull_back(grads)


def keep_input(
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    exact: bool,
    ahead: Overlap | None = None,
) -> Any:
    """Run a module so that it keeps its arguments and no graph; `exact`: by equal kernels twice."""
    call, tensors = Call.split(module, args, kwargs)
    kept = KeptInput(name, call, with_graph=exact)
    kept.ahead = ahead
    return tree_unflatten(kept.apply(tensors), kept.spec)


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
                'use backward="store" for gradients of gradients'
            )
        kept, this = ctx.kept, _Job(ctx)
        if kept.ahead is None:
            return None, *this.finish(this.prepare(flows=kept.flows(grads)), grads)
        return None, *kept.ahead.step(this, grads)


NEARBY = 24  # how many nodes of the graph are looked at: additions and views lie between units


class _Job:
    """The backward of a node, in the two parts that can be run apart."""

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
        found = None if node is None else _Job(node)
        return found if found is not None and found._is_there() else None

    def _node_before(self) -> Any:
        """The node of the next unit, as far as can be seen."""
        queue = _before_it(self._ctx)
        for _ in range(NEARBY):
            if not queue:
                return None
            node = queue.pop(0)
            kept = getattr(node, "kept", None)
            if isinstance(kept, Kept):
                return node if kept.precedes(self.key) else None
            queue += _before_it(node)
        return None

    def prepare(self, *, flows: bool = True) -> Any:
        with naming(self.key.name):
            saved, self._unpacked = self._saved(), None
            return self.key.prepare(saved, self._needs, flows=flows)

    def _saved(self) -> Sequence[Tensor]:
        """What the node saved; hooks, as of torch's checkpoint, may unpack it only once."""
        if self._unpacked is None:
            self._unpacked = _saved(self._ctx)
        return self._unpacked

    def _is_there(self) -> bool:
        """Whether what the node saved can be used before its turn.

        It cannot be where something has changed, which is an error only if its turn comes, or where
        FSDP has taken the memory of a parameter, to gather it again when its turn comes.
        """
        try:
            saved = self._saved()
        except (ChangedError, RuntimeError):
            return False
        return all(each.untyped_storage().size() or not each.numel() for each in saved)

    def is_bound(self, prepared: Any) -> bool:
        return prepared is not None and not prepared.is_free

    def finish(self, prepared: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        with naming(self.key.name):
            found: list[Tensor | None] = self.key.finish(prepared, self._needs, grads)
            return found


def _before_it(node: Any) -> list[Any]:
    """The nodes before it, without parameters: a unit may have many."""
    before = [each for each, _ in node.next_functions if each is not None]
    return [each for each in before if each.next_functions or hasattr(each, "kept")]


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
