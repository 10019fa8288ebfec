"""A second run that stops as soon as the backward has all tensors that it needs.

The first run builds the graph, and drops the tensors that it saves. The second run puts them back,
and ends with the last one:

    first run      norm   attention   norm   up   gelu   down      tensors are dropped
    second run     norm   attention   norm   up   gelu             and put back

What follows, as the last matrix product of a transformer's block, is not run again. Torch's
checkpoint stops in the same way. A second run that is unlike the first one, with other shapes or
more tensors, has a graph of its own, and runs to its end.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from redivider._torch_private import backward_keeps_graph, compiled_call
from redivider.errors import UnitError
from redivider.replay import Call, GraphRun, Record
from redivider.replay.call import refused_gradient
from redivider.replay.random import devices_of, get_state, set_state
from redivider.tree import map_tensors

# Nodes of operations that save tensors before they compute, and take long.
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
    is_plain = all(compiled_call(module) is None for module in call.modules)
    if not (any(needs) and is_plain and _pays.get(call.module, True)):
        return *call.first_run(tensors, with_graph=with_graph), None
    is_known = call.module in _pays
    undo = None if is_known else _snapshot(call.modules, tensors[0].device)
    try:
        output, record, graph = _run_emptied(call, tensors, needs)
    except _Missing:
        _pays[call.module] = False
        if undo is None:
            raise UnitError(
                f"{call.name}: it computes gradients inside of its forward, and did not the first "
                "time; let its first forward do so as well"
            ) from None
        undo()
        return *call.first_run(tensors, with_graph=with_graph), None
    if not is_known:
        _pays[call.module] = graph.ends_with_product()
    return output, record, graph if _pays[call.module] else None


def _snapshot(modules: Sequence[nn.Module], device: torch.device) -> Callable[[], None]:
    """Return a function that restores buffers and random state."""
    states = {device: get_state(device) for device in devices_of(device)}
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = {buffer: buffer.clone() for module in modules for buffer in module.buffers(False)}

    def undo() -> None:
        for device, state in states.items():
            set_state(device, state)
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)

    return undo


def _run_emptied(
    call: Call, tensors: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Any, Record, "EmptiedGraph"]:
    """Run a module, and return its output, the record of the run, and its graph."""
    places: list[ref[_Place]] = []
    door = _Door()

    def drop(tensor: Tensor) -> _Place:
        place = _Place(tensor)
        places.append(ref(place))
        return place

    with saved_tensors_hooks(drop, partial(_read, door, call.name)):
        run, record = call.only_run(tensors, needs)
    door.state = "shut"
    run.refuse_gradients(call.name, unless=lambda: door.state == "open")
    output = map_tensors(Tensor.detach, run.output)
    return output, record, EmptiedGraph(run, len(tensors) - len(call.parameters), places, door)


class _Missing(BaseException):
    """A backward inside of a module needs tensors that were dropped."""


class _Full(BaseException):
    """All tensors are there. No Exception, which modules might catch."""


class _Different(BaseException):
    """A tensor is not like that of the first run."""


class _Place:
    """Place of a tensor that a graph has saved."""

    __slots__ = ("__weakref__", "kind", "tensor", "version")

    def __init__(self, like: Tensor) -> None:
        self.kind = _kind(like)
        self.tensor: Tensor | None = None
        self.version = 0


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _read(door: "_Door", name: str, place: _Place) -> Tensor:
    if door.state == "running":
        raise _Missing
    if place.tensor is None:
        raise refused_gradient(name)
    if place.tensor._version != place.version:
        raise RuntimeError(
            f"{name}: a tensor that its backward needs was changed by an inplace operation"
        )
    return place.tensor


class _Door:
    """State of a graph, which lets gradients pass while it is open."""

    state: Literal["running", "shut", "open"] = "running"


class EmptiedGraph(GraphRun):
    """Graph without the tensors that it saves, until `fill`.

    Args:
        run: A run with its graph, which loses its output and the memory of its arguments.
        num_arguments: Number of tensors among its leaves that are arguments.
        places: Places of the tensors, in the order in which they were saved.
        door: State of the graph.
    """

    def __init__(
        self, run: GraphRun, num_arguments: int, places: Sequence[ref[_Place]], door: _Door
    ) -> None:
        super().__init__(run.leaves, run.output)
        self.output = None
        self._places, self._door = places, door
        for number, leaf in enumerate(self.leaves[:num_arguments]):
            if not leaf.requires_grad:
                self.leaves[number] = leaf.new_empty(0)
            elif type(leaf) is Tensor:  # the graph holds its base
                assert leaf._base is not None
                leaf._base.data = leaf.data = leaf.new_empty(0)

    def ends_with_product(self) -> bool:
        """Return whether the operation that saves last is a matrix product, or like one."""
        nodes: set[Any] = {root.edge.node for root in self._roots if root.edge is not None}
        while nodes:
            node = max(nodes, key=lambda node: node._sequence_nr())  # the one that ran last
            name = node.name().removesuffix("0").removesuffix("Backward")
            if name not in LIGHT:
                return name in PRODUCTS
            nodes.remove(node)
            nodes.update(other for other, _ in node.next_functions if other is not None)
        return False

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
        places = {number: place for number, own in enumerate(self._places) if (place := own())}
        last = max(places, default=-1)
        numbers = count()

        def put(tensor: Tensor) -> Tensor:
            number = next(numbers)
            place = places.get(number)
            if place is not None:
                if place.kind != _kind(tensor):
                    raise _Different
                place.tensor, place.version = tensor.detach(), tensor._version
            if number >= last:
                raise _Full
            return tensor.detach()

        def run_until_full(*args: Any, **kwargs: Any) -> None:
            with suppress(_Full, _Different), saved_tensors_hooks(put, Tensor.detach):
                (run or call.module)(*args, **kwargs)

        is_full = False
        try:
            if places:
                call.rerun(tensors, needs, record, run_until_full)
            is_full = all(place.tensor is not None for place in places.values())
        finally:
            if not is_full:
                _clear(places.values())
        return is_full

    def pull_back(
        self, grads: Sequence[Tensor | None], *, retain_graph: bool = False
    ) -> list[Tensor | None]:
        self._door.state = "open"
        try:
            return super().pull_back(grads, retain_graph=retain_graph or backward_keeps_graph())
        finally:
            self._door.state = "shut"
            _clear(place for own in self._places if (place := own()))  # of a graph that is retained


def _clear(places: Iterable[_Place]) -> None:
    for place in places:
        place.tensor = None
