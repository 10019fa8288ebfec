"""A module's call, split into the tensors that autograd must see and the rest.

A backward that runs a module again must use leaves of its own. With the caller's parameters as
leaves, their hooks would fire inside that backward, and again when their gradients arrive.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.backends import mha
from torch.utils._pytree import tree_flatten, tree_unflatten

from redivider._torch_private import compiled_call
from redivider.errors import UnitError, writes_error
from redivider.replay.autocast import uncached_casts
from redivider.replay.buffers import know_buffers
from redivider.replay.compiled_node import Root, call_node, find_compiled_node
from redivider.replay.module_tree import ModuleTree
from redivider.replay.record import Record
from redivider.replay.switch import switched_off
from redivider.replay.version_counters import count_fused_steps
from redivider.skip import warn_of_skip
from redivider.tree import map_tensors, tensors_of

# A run temporarily swaps parameters, flags and random state of the caller's own modules.
_run_lock = RLock()

_TENSOR = object()  # marks the place of a tensor among the arguments

# Modules whose dependences have been verified in an earlier run.
_verified: WeakSet[nn.Module] = WeakSet()


def trust(module: nn.Module, like: nn.Module) -> None:
    """Take for known of a copy of a module what earlier runs have found out about the module."""
    pairs = list(zip_longest(module.modules(), like.modules()))
    if any(type(own) is not type(other) for own, other in pairs):  # some copies leave modules out
        return
    for own, other in pairs:
        if other in _verified:
            _verified.add(own)
        know_buffers(own, other)


class Call:
    """A module with its arguments, as a flat list of tensors: those of the arguments, then weights.

    The list passes through autograd; a run receives the same tensors, or others in their place.
    """

    def __init__(self, tree: ModuleTree, others: list[Any], spec: Any) -> None:
        self.module = tree.modules[0]
        self.first: Callable[..., Any] = self.module
        """Function that runs the module with its graph for the first time."""
        self.name = ""
        """Name of the module, for errors of its backward."""
        self.modules = tree.modules
        self._tree = tree
        self._others = others  # the arguments without tensors, which must not be kept alive here
        self._spec = spec

    @classmethod
    def split(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["Call", list[Tensor]]:
        """Split `module(*args, **kwargs)` into a call and its tensors."""
        with _run_lock:
            tree = ModuleTree(module)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # the usual case
            return cls(tree, [_TENSOR], None), [args[0], *tree.parameters]
        values, spec = tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        others = [_TENSOR if isinstance(value, Tensor) else value for value in values]
        return cls(tree, others, spec), [*tensors, *tree.parameters]

    @property
    def is_compiled(self) -> bool:
        """True if the module is compiled."""
        return compiled_call(self.module) is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in their order at the end of the list of tensors."""
        return self._tree.parameters

    def first_run(
        self,
        tensors: Sequence[Tensor],
        *,
        with_graph: bool,
        record: Record | None = None,
        other_weights: bool = False,
    ) -> tuple[Any, Record]:
        """Run the module for its values alone, and record what a second run needs.

        Args:
            tensors: Tensors of the arguments, then the weights.
            with_graph: Build a graph and drop it, so that this run uses the kernels of the second.
            record: Record to fill; a new one by default.
            other_weights: True if the weights in `tensors` are not the module's own.
        """
        # The first call builds a graph in any case, to verify what the module depends on. But a
        # compiled module draws other random numbers than a plain one, so its first run must be
        # compiled as well; its dependences are verified in the second run.
        with_graph = with_graph or self.first is not self.module
        if with_graph or not (self.is_compiled or self.module in _verified):
            needs = [tensor.requires_grad for tensor in tensors]
            with unhooked_graph():
                run, record = self.only_run(tensors, needs, record=record)
            run.refuse_gradients(self.name)
            return map_tensors(Tensor.detach, run.output), record
        if self.module not in _verified:
            _verify_unsharded(self.modules)
        record = self._new(record, tensors)
        versions = [tensor._version for tensor in tensors]
        with _run_lock, record.first(), torch.no_grad(), uncached_casts(), _no_fast_path():
            if other_weights:
                output = self._run(tensors, self.module)
            else:
                args, kwargs = self._arguments(tensors)
                output = self.module(*args, **kwargs)
        _verify_unwritten(tensors, versions)
        return map_tensors(Tensor.detach, output), record

    def run_plainly(self, tensors: Sequence[Tensor]) -> Any:
        """Run the module on these tensors, without a record or checks."""
        with _run_lock, uncached_casts(), _no_fast_path():
            return self._run(tensors, self.module)

    def only_run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], *, record: Record | None = None
    ) -> tuple["GraphRun", Record]:
        """Run the module for the first time with its graph, on leaves made of these tensors."""
        record = self._new(record, tensors)
        versions = [tensor._version for tensor in tensors]
        with (
            _run_lock,
            record.first(),
            torch.enable_grad(),
            uncached_casts(),
            _no_fast_path(),
            _explaining_writes(),
        ):
            leaves = self._leaves(tensors, needs)
            output = self._run(leaves, self.first)
        _verify_unwritten(tensors, versions)
        if self.module not in _verified:
            _verify_unsharded(self.modules)
        _verify_leaves(output, leaves)
        if leaves:
            warn_of_skip(self.module, output, leaves[0])
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

        Args:
            tensors: Tensors of the arguments, then the weights.
            needs: Flags of the tensors that need a gradient.
            record: Record of the first run.
            run: Function to call instead of the module, such as a compiled variant of it.
        """
        with _run_lock, record.again(), torch.enable_grad(), _no_fast_path():
            leaves = self._leaves(tensors, needs)
            output = self._run(leaves, run or self.module)
        _verify_leaves(output, leaves)
        return GraphRun(leaves, output)

    def holding(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Use the weights at the end of this list as those of the module, inside."""
        return self._tree.substituted(tensors[len(tensors) - len(self.parameters) :])

    def _new(self, record: Record | None, tensors: Sequence[Tensor]) -> Record:
        count_fused_steps()
        device = tensors[0].device if tensors else torch.device("cpu")
        return record or Record(self.modules, device)

    def _leaves(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
        """Return stand-ins whose gradients can be computed, detached from the tensors' history.

        Those of the arguments are views of leaves. Torch's module tracker, and with it the FLOP
        counter, hooks the inputs of a module, and cannot hook leaves in `torch.autograd.grad`. A
        tensor that neither needs nor requires a gradient stays itself: detaching a quantised weight
        would lose more than its history.
        """
        leaves = [
            tensor.detach().requires_grad_(need) if need or tensor.requires_grad else tensor
            for tensor, need in zip(tensors, needs, strict=True)
        ]
        num_arguments = len(leaves) - len(self.parameters)
        return [leaf.view_as(leaf) for leaf in leaves[:num_arguments]] + leaves[num_arguments:]

    def _run(self, tensors: Sequence[Tensor], run: Callable[..., Any]) -> Any:
        args, kwargs = self._arguments(tensors)
        parameters = tensors[len(tensors) - len(self.parameters) :]
        with self._tree.substituted(parameters):
            return run(*args, **kwargs)

    def _arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._spec is None:
            return (tensors[0],), {}
        following = iter(tensors)
        values = [next(following) if value is _TENSOR else value for value in self._others]
        args, kwargs = tree_unflatten(values, self._spec)
        return args, kwargs


class GraphRun:
    """A run with its graph: its output and its leaves."""

    def __init__(self, leaves: list[Tensor], output: Any) -> None:
        self.leaves = leaves
        self.output = output
        self._roots = [Root(tensor) for tensor in tensors_of(output)]

    @property
    def is_free(self) -> bool:
        """True if `pull_back` runs on the current CUDA stream, not on that of this run.

        Autograd returns to the stream of this run. A compiled module has only one node, which can
        be called without autograd's engine.
        """
        return find_compiled_node(self._roots, self.leaves) is not None

    def without_first(self) -> tuple[Tensor, "GraphRun"]:
        """Return the first output, and the run without it, which holds no output's memory."""
        rest = GraphRun(self.leaves, None)
        rest._roots = self._roots[1:]
        return self.output[0], rest

    def refuse_gradients(self, name: str, *, unless: Callable[[], bool] = bool) -> None:
        """Refuse gradients that reach the leaves, unless a function says otherwise."""

        def refuse(grad: Tensor) -> None:
            if not unless():
                raise refused_gradient(name)

        for leaf in self.leaves:
            if leaf.requires_grad:
                leaf.register_hook(refuse)  # type: ignore[no-untyped-call]

    def pull_back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the leaves from those of the output's tensors; free the graph."""
        node = find_compiled_node(self._roots, self.leaves)
        if node is not None and any(grad is not None for grad in grads):
            return call_node(node, self._roots, grads, self.leaves)
        edges, entering = self.entering(grads)
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not edges or not wanted:
            return [None] * len(self.leaves)
        computed = torch.autograd.grad(edges, wanted, entering, allow_unused=True)
        return place_grads(computed, self.leaves)

    def entering(self, grads: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return where gradients enter the graph, and the gradients."""
        pairs = [
            (root.edge, grad.to(root.dtype))
            for root, grad in zip(self._roots, grads, strict=True)
            if grad is not None and root.edge is not None
        ]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]


def place_grads(grads: Iterable[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of all leaves, where only those that need one are given."""
    following = iter(grads)
    return [next(following) if leaf.requires_grad else None for leaf in leaves]


def refused_gradient(name: str) -> UnitError:
    """Return the error for a gradient from elsewhere than the output of a module."""
    return UnitError(
        f"{name}: a gradient reached a tensor that was kept inside of the module in the forward, "
        "such as a loss of its own, logits of a router or a map of attention; the graph of that "
        "run is not kept, so the gradient would be lost: return the tensor beside the output"
    )


def unhooked_graph() -> saved_tensors_hooks:
    """Build a temporary graph inside, which the caller's hooks on saved tensors must not see."""
    return saved_tensors_hooks(_keep, _keep)


def _keep(tensor: Tensor) -> Tensor:
    return tensor.detach()  # a saved output would otherwise keep its own graph alive


def _no_fast_path() -> AbstractContextManager[None]:
    """Compute the same with and without a graph.

    In evaluation mode and without a graph, torch's TransformerEncoder takes a fast path, in which
    padded positions become zero.
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
    if any(tensor._version != old for tensor, old in zip(tensors, versions, strict=True)):
        raise writes_error()


def _verify_unsharded(modules: Sequence[nn.Module]) -> None:
    # A module that is run by its forward alone has no hooks, and its caller has gathered weights.
    if is_sharded(
        module for module in modules if module is not getattr(modules[0], "wrapped", None)
    ):
        raise UnitError(
            f"{type(modules[0]).__name__} is wrapped by fully_shard, in whole or in part, which "
            "swaps its parameters while it runs, so their gradients would be lost; shard the whole "
            "unit (the Coupling) or the chain instead"
        )


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Return whether `fully_shard` has wrapped one of these modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules)


def _verify_leaves(output: Any, leaves: Sequence[Tensor]) -> None:
    """Refuse a graph that ends in a leaf that is neither an argument nor a parameter."""
    known = {id(leaf if leaf._base is None else leaf._base) for leaf in leaves}
    queue: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    seen = {None, *queue}
    while queue:
        node = queue.pop()
        following = node.next_functions if node is not None else ()
        for after, _ in following:
            if after not in seen:
                seen.add(after)
                queue.append(after)
        # Only end nodes can have a variable, and looking up a missing attribute is slow.
        leaf = None if following else getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise UnitError(
                f"f depends on a tensor of shape {tuple(leaf.shape)} that requires grad and is "
                "neither an argument nor a parameter of f, so its gradient would be lost; make it "
                "a parameter of f, or pass it as a keyword that the unit takes"
            )
