"""A module's call taken apart: the tensors that autograd must see, and the rest.

A backward that runs a module again must do so on leaves of its own: with the caller's parameters as
leaves their hooks would fire inside, and once more when the gradient arrives where it belongs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import mha
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from redivider.errors import UnitError
from redivider.replay.anatomy import Anatomy
from redivider.replay.autocast import uncached_casts
from redivider.replay.compiled_node import Root, call_node, find_compiled_node
from redivider.replay.record import Record
from redivider.replay.switch import switched_off
from redivider.replay.weights import count_fused_steps
from redivider.tree import tensors_of

# A run swaps parameters, flags and random state of the caller's own modules while it lasts.
_one_at_a_time = RLock()

_TENSOR = object()  # marks the place of a tensor among the arguments

_verified: WeakSet[nn.Module] = WeakSet()


class Call:
    """A module with its arguments, as a flat list of tensors: the arguments', then the parameters.

    The list is passed through autograd and comes back, the same or with others in their place.
    """

    def __init__(self, anatomy: Anatomy, others: list[Any], spec: Any) -> None:
        self.module = anatomy.modules[0]
        self.modules = anatomy.modules
        self._anatomy = anatomy
        self._others = others  # the arguments without their tensors, which would be kept alive here
        self._spec = spec

    @classmethod
    def split(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["Call", list[Tensor]]:
        """Take `module(*args, **kwargs)` apart into a call and its tensors."""
        with _one_at_a_time:
            anatomy = Anatomy(module)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return cls(anatomy, [_TENSOR], None), [args[0], *anatomy.parameters]  # as is usual
        values, spec = tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        others = [_TENSOR if isinstance(value, Tensor) else value for value in values]
        return cls(anatomy, others, spec), [*tensors, *anatomy.parameters]

    @property
    def is_compiled(self) -> bool:
        """Whether the module runs as the compiler made it."""
        return self.module._compiled_call_impl is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in the order in which they end the list of tensors."""
        return self._anatomy.parameters

    def first_run(
        self,
        tensors: Sequence[Tensor],
        *,
        with_graph: bool,
        record: Record | None = None,
        other_weights: bool = False,
    ) -> tuple[Any, Record]:
        """Run the module for its values alone, and record what a second run needs.

        Its own weights are those in `tensors`, unless these are said to be others.
        Where a graph is built, it is dropped before this returns. It makes the run take the same
        kernels as the second one, and shows at the first call what the module depends on.
        """
        # A compiled module draws other random numbers than a plain one, so its first run must be
        # compiled as well; what it depends on is verified in the second.
        if with_graph or not (self.is_compiled or self.module in _verified):
            needs = [each.requires_grad for each in tensors]
            # Nobody outside is to count on this graph: hooks of the caller's stay out of it.
            with saved_tensors_hooks(_keep, _keep):
                run, record = self.only_run(tensors, needs, record=record)
            return _detached(run.output), record
        if self.module not in _verified:
            _verify_unsharded(self.modules)
        record = self._new(record, tensors)
        versions = [each._version for each in tensors]
        with _one_at_a_time, record.first(), torch.no_grad(), uncached_casts(), _one_way():
            if other_weights:
                output = self._run(tensors, self.module)
            else:
                args, kwargs = self._arguments(tensors)
                output = self.module(*args, **kwargs)
        _verify_unwritten(tensors, versions)
        return _detached(output), record

    def run_plainly(self, tensors: Sequence[Tensor]) -> Any:
        """Run the module on these tensors, and see to nothing else."""
        with _one_at_a_time, uncached_casts(), _one_way():
            return self._run(tensors, self.module)

    def only_run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], *, record: Record | None = None
    ) -> tuple["GraphRun", Record]:
        """Run the module for the first time with its graph, on leaves made of these tensors."""
        record = self._new(record, tensors)
        versions = [each._version for each in tensors]
        with (
            _one_at_a_time,
            record.first(),
            torch.enable_grad(),
            uncached_casts(),
            _one_way(),
            _explaining_writes(),
        ):
            leaves = self._leaves(tensors, needs)
            output = self._run(leaves, self.module)
        _verify_unwritten(tensors, versions)
        if self.module not in _verified:
            _verify_unsharded(self.modules)
        _verify_leaves(output, leaves)
        _verified.add(self.module)
        return GraphRun(leaves, output), record

    def rerun(
        self,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        record: Record,
        run: Callable[..., Any] | None = None,
    ) -> "GraphRun":
        """Run the module again, with its graph, on leaves made of these tensors.

        Given `run`, that is called with the arguments, and runs the module with more around it.
        """
        with _one_at_a_time, record.again(), torch.enable_grad(), _one_way():
            leaves = self._leaves(tensors, needs)
            output = self._run(leaves, run or self.module)
        _verify_leaves(output, leaves)
        return GraphRun(leaves, output)

    def holding(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Let the module have the weights that end this list, for a while."""
        return self._anatomy.substituted(tensors[len(tensors) - len(self.parameters) :])

    def _new(self, record: Record | None, tensors: Sequence[Tensor]) -> Record:
        count_fused_steps()
        device = tensors[0].device if tensors else torch.device("cpu")
        return record or Record(self.modules, device)

    def _leaves(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
        """Stand-ins whose gradients can be asked for, cut off from the tensors' own history.

        Those of the arguments are views of leaves: torch's module tracker, and its flop counter
        with it, hooks what a module is given, and cannot hook leaves in `torch.autograd.grad`.
        What has neither needs none: quantised weights are more than their numbers.
        """
        leaves = [
            tensor.detach().requires_grad_(need) if need or tensor.requires_grad else tensor
            for tensor, need in zip(tensors, needs, strict=True)
        ]
        num_arguments = len(leaves) - len(self._anatomy.parameters)
        return [leaf.view_as(leaf) for leaf in leaves[:num_arguments]] + leaves[num_arguments:]

    def _run(self, tensors: Sequence[Tensor], run: Callable[..., Any]) -> Any:
        args, kwargs = self._arguments(tensors)
        parameters = tensors[len(tensors) - len(self._anatomy.parameters) :]
        with self._anatomy.substituted(parameters):
            return run(*args, **kwargs)

    def _arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._spec is None:
            return (tensors[0],), {}
        following = iter(tensors)
        values = [next(following) if value is _TENSOR else value for value in self._others]
        args, kwargs = tree_unflatten(values, self._spec)
        return args, kwargs


class GraphRun:
    """A run with its graph: what it gave, and the leaves it was made from."""

    def __init__(self, leaves: list[Tensor], output: Any) -> None:
        self.leaves = leaves
        self.output = output
        self._roots = [Root(each) for each in tensors_of(output)]

    @property
    def is_free(self) -> bool:
        """Whether `pull_back` runs on the current CUDA stream, and not on that of this run.

        Autograd goes back to the stream of this run. A compiled module has one node alone, which
        can be called without it.
        """
        return find_compiled_node(self._roots, self.leaves) is not None

    def without_first(self) -> tuple[Tensor, "GraphRun"]:
        """The first output alone, and the same run whose other outputs have left their memory."""
        rest = GraphRun(self.leaves, None)
        rest._roots = self._roots[1:]
        return self.output[0], rest

    def pull_back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn the gradients of the output's tensors into those of the leaves; frees the graph."""
        node = find_compiled_node(self._roots, self.leaves)
        if node is not None and any(grad is not None for grad in grads):
            return call_node(node, self._roots, grads, self.leaves)
        pairs = [
            (root.edge, grad.to(root.dtype))
            for root, grad in zip(self._roots, grads, strict=True)
            if grad is not None and root.edge is not None
        ]
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not pairs or not wanted:
            return [None] * len(self.leaves)
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
        )
        return [next(found) if leaf.requires_grad else None for leaf in self.leaves]


def _detached(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach()
    return tree_map_only(Tensor, Tensor.detach, tree)


def _keep(tensor: Tensor) -> Tensor:
    return tensor.detach()  # itself, an output would keep its own graph alive


def _one_way() -> AbstractContextManager[None]:
    """Compute alike with and without a graph.

    In evaluation mode torch's TransformerEncoder takes a way of its own where there is none, on
    which what is padded becomes zero.
    """
    return switched_off(mha.get_fastpath_enabled, mha.set_fastpath_enabled)


@contextmanager
def _explaining_writes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "in-place operation" not in str(error):
            raise
        raise writes_error() from error


def _verify_unwritten(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    if any(each._version != version for each, version in zip(tensors, versions, strict=True)):
        raise writes_error()


def writes_error() -> UnitError:
    """What to say of an f that changes what it is given."""
    return UnitError(
        "f writes into its own input or parameters, which others still need; leave out "
        "inplace=True where f begins"
    )


def _verify_unsharded(modules: Sequence[nn.Module]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in modules):
        raise UnitError(
            f"{type(modules[0]).__name__} is wrapped by fully_shard, in whole or in part, which "
            "swaps its parameters while it runs, so their gradients would be lost; shard the whole "
            "unit (the Coupling) or the chain instead"
        )


def _verify_leaves(output: Any, leaves: Sequence[Tensor]) -> None:
    known = {id(leaf if leaf._base is None else leaf._base) for leaf in leaves}
    queue: list[Any] = [each.grad_fn for each in tensors_of(output)]
    seen = {None, *queue}
    while queue:
        node = queue.pop()
        following = node.next_functions if node is not None else ()
        for after, _ in following:
            if after not in seen:
                seen.add(after)
                queue.append(after)
        # Asking for what is not there takes long, and only ends can have it.
        leaf = None if following else getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise UnitError(
                f"f depends on a tensor of shape {tuple(leaf.shape)} that requires grad and is "
                "neither an argument nor a parameter of f, so its gradient would be lost; make it "
                "a parameter of f, or pass it as a keyword that the unit takes"
            )
