"""A second run that stops as soon as the backward has all tensors that it needs.

The first run builds the graph, and drops the tensors that it saves. The second run puts them back,
and ends with the last one:

    first run      norm   attention   norm   up   gelu   down      tensors are dropped
    second run     norm   attention   norm   up   gelu             and put back

What follows, such as the last matrix product of a transformer's block, is not run again. Torch's
checkpoint stops in the same way. If the second run differs from the first, in shapes or in the
number of tensors, the module runs once more to its end, with a graph of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from redivider._torch_private import backward_keeps_graph, compiled_call
from redivider.backward.node import Kept
from redivider.errors import UnitError
from redivider.replay import Call, GraphRun, Record
from redivider.replay.call import refused_gradient
from redivider.replay.copies import remember_buffers
from redivider.replay.random import devices_of, get_state, set_state
from redivider.replay.statistics import writing_layers
from redivider.tree import map_tensors, tensors_of

# Nodes of expensive operations, which save their inputs and not their results.
PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Convolution")
# Nodes of operations that save no tensors.
LIGHT = (
    *("Add", "Sub", "Neg", "Sum", "Mean", "View", "UnsafeView", "ReshapeAlias", "Alias", "T"),
    *("Transpose", "Permute", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select", "Split"),
    *("Cat", "Clone", "ToCopy"),
)

# Whether it pays to stop early, by modules that have run.
_pays: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def first_run(
    call: Call, tensors: Sequence[Tensor], *, with_graph: bool
) -> tuple[Any, Record, "EmptiedGraph | None"]:
    """Run a module for its values, as `Call.first_run` does.

    The first graph of a module shows whether it pays to stop its second runs.

    Returns:
        Its output, the record of the run, and the graph, if the second run is to stop early.
    """
    needs = [tensor.requires_grad for tensor in tensors]
    is_known = call.module in _pays
    if not is_known and writing_layers(call.modules):
        _pays[call.module] = False  # the second run leaves statistics alone, by other operations
    is_plain = all(compiled_call(module) is None for module in call.modules)
    if not (any(needs) and is_plain and _pays.get(call.module, True)):
        return *call.first_run(tensors, with_graph=with_graph), None
    restore = None if is_known else _remember(call.modules, tensors[0].device)
    try:
        output, record, graph = _run_emptied(call, tensors, needs)
    except _DifferentiatesInside:
        _pays[call.module] = False
        if restore is None:
            raise
        restore()
        return *call.first_run(tensors, with_graph=with_graph), None
    if not is_known:
        _pays[call.module] = graph.pays()
    return output, record, graph if _pays[call.module] else None


def _remember(modules: Sequence[nn.Module], device: torch.device) -> Callable[[], None]:
    """Return a function that restores buffers and random state."""
    states = {device: get_state(device) for device in devices_of(device)}
    restore_buffers = remember_buffers(modules)

    def restore() -> None:
        for device, state in states.items():
            set_state(device, state)
        restore_buffers()

    return restore


def _run_emptied(
    call: Call, tensors: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Any, Record, "EmptiedGraph"]:
    """Run a module, and return its output, the record of the run, and its graph."""
    places: list[ref[_Place]] = []
    status = _Status()

    def drop(tensor: Tensor) -> _Place:
        place = _Place(tensor)
        places.append(ref(place))
        return place

    def read(place: _Place) -> Tensor:
        return _read(place, status, call.name)

    try:
        with saved_tensors_hooks(drop, read):
            run, record = call.only_run(tensors, needs)
    except Exception:
        if not status.was_read:
            raise
    if status.was_read:  # whatever the module made of the error of that
        raise _DifferentiatesInside(
            "it computes gradients inside of its forward, and did not the first time; let its "
            "first forward do so as well"
        )
    status.phase = "idle"
    run.refuse_gradients(call.name, unless=lambda: status.phase == "backward")
    output = map_tensors(Tensor.detach, run.output)
    return output, record, EmptiedGraph(run, len(tensors) - len(call.parameters), places, status)


class _DifferentiatesInside(UnitError):
    """A backward inside of a module needs tensors that were dropped."""


class _Full(Exception):
    """All tensors are there, or one is not like that of the first run."""


class _Place:
    """Place of a tensor that a graph has saved."""

    __slots__ = ("__weakref__", "kind", "tensor", "version")

    def __init__(self, like: Tensor) -> None:
        self.kind = _kind(like)
        self.tensor: Tensor | None = None
        self.version = 0


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Describe a tensor, so that another one in its place is noticed."""
    maker = None if tensor.grad_fn is None else tensor.grad_fn.name()
    return tensor.dtype, tensor.device, tensor.requires_grad, maker, _geometry(tensor)


def _geometry(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.layout
    return None if tensor.is_nested else (tensor.shape, tensor.stride())


class _Status:
    """Phase of a graph: its first run, its own backward, or neither."""

    phase: Literal["forward", "idle", "backward"] = "forward"
    was_read = False
    """Whether a tensor was read in the first run."""


def _read(place: _Place, status: _Status, name: str) -> Tensor:
    if status.phase == "forward":
        status.was_read = True
        raise RuntimeError("the tensors of this graph were dropped")
    if place.tensor is None:
        raise refused_gradient(name)
    if place.tensor._version != place.version:
        raise RuntimeError(
            f"{name}: a tensor that its backward needs was changed by an inplace operation"
        )
    return place.tensor


class EmptiedGraph(GraphRun):
    """Graph without the tensors that it saves, until `fill`.

    Args:
        run: A run with its graph, whose leaves lose their memory.
        num_arguments: Number of tensors among its leaves that are arguments.
        places: Places of the tensors, in the order in which they were saved.
        status: Phase of the graph.
    """

    def __init__(
        self, run: GraphRun, num_arguments: int, places: Sequence[ref[_Place]], status: _Status
    ) -> None:
        super().__init__([], run.output)
        self.output = None
        self._places, self._status = places, status
        self._geometries = [_geometry(leaf) for leaf in run.leaves[:num_arguments]]
        self._ends = [
            get_gradient_edge(leaf) if leaf.requires_grad else None for leaf in run.leaves
        ]
        for leaf in run.leaves[:num_arguments]:
            # Only the base, which the graph holds: the module may hold its view, the leaf.
            if leaf.requires_grad and type(leaf._base) is Tensor:
                leaf._base.data = leaf.new_empty(0)
        self._lock = Lock()  # of one backward; several may run where the graph is retained

    def pays(self) -> bool:
        """Return whether second runs should stop early.

        That saves time if the last operation that saves tensors is a matrix product or convolution.
        It costs memory if nodes hold tensors in other ways.
        """
        ends_with_product, nodes = None, {root.edge.node for root in self._roots if root.edge}
        seen: set[Any] = set()
        while nodes:
            node: Any = max(nodes, key=lambda node: node._sequence_nr())  # the one that ran last
            nodes.remove(node)
            seen.add(node)
            following = {other for other, _ in node.next_functions if other is not None}
            nodes |= {other for other in following - seen if other.next_functions}
            if isinstance(node, FunctionCtx) and _holds_tensors(vars(node).values()):
                return False
            name = node.name().removesuffix("0").removesuffix("Backward")
            if ends_with_product is None and name not in LIGHT:
                ends_with_product = name in PRODUCTS
        return bool(ends_with_product)

    def fill(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        record: Record,
        run: Callable[..., Any] | None,
    ) -> bool:
        """Run the module again as far as the graph needs it, with the arguments of `Call.rerun`.

        Returns:
            False if the run was not like the first one; then the graph is of no use.
        """
        # Other strides may lead to other operations.
        if self._geometries != [_geometry(x) for x in tensors[: len(self._geometries)]]:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        places = {number: place for number, own in enumerate(self._places) if (place := own())}
        last = max(places, default=-1)
        numbers = count()
        is_done = False

        def put(tensor: Tensor) -> Tensor:
            nonlocal is_done
            number = next(numbers)
            place = places.get(number)
            is_alike = place is None or place.kind == _kind(tensor)
            if place is not None and is_alike:
                place.tensor, place.version = tensor.detach(), tensor._version
            is_done = is_done or not is_alike or number >= last
            if is_done:
                raise _Full
            return tensor.detach()

        def run_until_full(*args: Any, **kwargs: Any) -> None:
            try:
                with saved_tensors_hooks(put, Tensor.detach):
                    (run or call.module)(*args, **kwargs)
            except Exception:
                if not is_done:  # else it is ours, or what the module made of it
                    raise

        is_full = False
        try:
            if places:
                call.rerun(tensors, needs, record, run_until_full)
            is_full = all(place.tensor is not None for place in places.values())
        finally:
            if not is_full:
                self._empty()
        if not is_full:
            _pays[call.module] = False  # do not try it again
        return is_full

    def pull_back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        self._status.phase = "backward"
        try:
            edges, entering = self.entering(grads)
            wanted = [end for end in self._ends if end is not None]
            if not edges or not wanted:
                return [None] * len(self._ends)
            computed = torch.autograd.grad(
                *(edges, wanted, entering),
                retain_graph=backward_keeps_graph(),
                allow_unused=True,
            )
        finally:
            self._status.phase = "idle"
            self._empty()
        following = iter(computed)
        return [None if end is None else next(following) for end in self._ends]

    def _empty(self) -> None:
        for own in self._places:
            place = own()
            if place is not None:
                place.tensor = None
        self._lock.release()


def _holds_tensors(values: Iterable[Any]) -> bool:
    return any(tensors_of(value) or isinstance(value, Kept) for value in values)
