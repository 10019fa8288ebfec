"""A unit, or a few in a row, that run by themselves: bytes and cost of their forward and backward.

Units run on an input like their own, as their chain would run them. Tensors that enter and leave
are counted apart: they lie between units, and neighbours may share them (problem.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from redivider.arithmetic import Arithmetic
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import keep_input
from redivider.backward.row import Row, prepare_streams
from redivider.backward.stopwatch import Stopwatch
from redivider.backward.strategy import begin_pass, resolve_strategy
from redivider.budget.meter import Meter, address_of, counting, gpu_of, size_of
from redivider.checks.flops import counting_flops
from redivider.coupling import Coupling
from redivider.gpu.garbage import uncollected
from redivider.replay.autocast import uncached_casts
from redivider.replay.call import trust
from redivider.tree import map_tensors, tensors_of

NUM_TIMED = 3  # runs at most, of which the fastest one counts
REVERSED = ("reverse", "overlap", "save")  # choices by which a coupling may rebuild its input
NUM_IN_ROW = 3  # couplings, so that one is inside: the lowest need not rebuild its input

Run: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Part:
    """A unit, a block or a loss, and how it is called."""

    module: Any
    side: dict[str, Any]
    arithmetic: Arithmetic
    is_loss: bool = False
    is_first: bool = False
    """Whether its input is that of the chain, which does not count."""
    args: tuple[Any, ...] = ()
    """Arguments after its input."""
    begin: Callable[[str], Run] | None = None
    """For a block: a function from a choice to a function that runs the block by it."""
    is_captured: bool = False
    """Whether it is part of a captured step."""
    checks_drift: bool = False
    """Whether some steps compare rebuilt streams with the original ones."""

    @property
    def couples(self) -> bool:
        """Whether it is a coupling."""
        return isinstance(self.module, Coupling)

    @property
    def weights(self) -> list[Tensor]:
        """Parameters that get a gradient."""
        params = self.module.parameters() if isinstance(self.module, nn.Module) else ()
        return [param for param in params if param.requires_grad]

    @property
    def others(self) -> list[Tensor]:
        """Tensors beside its input, as keywords, that get a gradient."""
        return wanted_of((self.args, self.side))


@dataclass(frozen=True)
class Usage:
    """Bytes that a choice needs for one unit, beside those of the tensors around it."""

    keeps: tuple[int, ...]
    """Tensors that it keeps, by their place: those of its input, then those of its output."""
    held: int
    """Bytes between forward and backward."""
    forward: int
    """Bytes in the forward, beyond those of its input and those that are held and kept."""
    backward: int
    """Bytes in the backward, beyond those that are held and kept."""
    left: int = 0
    """Bytes that are released with the graph, not in the backward."""
    inside: int = 0
    """All bytes in the backward of the couplings of a row below its top."""
    excess: tuple[int, int] = (0, 0)
    """Bytes of the memory in which gradients of its input lie beyond their own: of all, and of the
    first one, which passes through a coupling below."""


class Timer:
    """Times on a GPU, all of one watch: by one it knows how long the host will take for the next.

    Args:
        is_captured: Whether units are part of a captured step, which does not wait for the host.
    """

    def __init__(self, *, is_captured: bool) -> None:
        self._watch = Stopwatch(_step, on_gpu=True, ahead=is_captured)
        self._num = 1  # units that it has timed last

    def take(self, num: int, call: Callable[[Any], None]) -> Callable[[], float]:
        """Time a few calls, or one that the host does not delay; return a function.

        It waits for the device, and returns the seconds of the fastest call.

        Args:
            num: Number of units that run in a call.
            call: A function that passes its arguments to the watch.
        """
        watch = self._watch
        watch.host *= num / self._num
        self._num = num
        first = len(watch.readings)
        for _ in range(NUM_TIMED):
            call(watch)
            if watch.was_ahead:
                return watch.readings[-1]
        readings = watch.readings[first:]
        return lambda: min(read() for read in readings)


class Trial:
    """Runs of one kind of unit.

    The cost of a choice is measured first. Those runs verify modules, compile them, and make
    workspaces, which then do not count as bytes. After a row, a unit of it may be counted alone.

    Args:
        part: A unit of this kind.
        x: Its input.
        needs: Whether its input gets a gradient.
        timer: Timer of all trials.
    """

    def __init__(self, part: Part, x: Any, needs: bool, timer: Timer) -> None:
        self.device = gpu_of(x)
        self.alone = [part]
        self._x, self._needs, self._timer = x, needs, timer
        # By the number of units and the choice.
        self._costs: dict[tuple[int, str], Callable[[], float]] = {}
        self._usages: dict[tuple[int, str], Usage] = {}

    @cached_property
    def row(self) -> list[Part]:
        """The coupling and copies of it in a row; copies have gradients of their own."""
        (part,) = self.alone
        copies = [deepcopy(part.module) for _ in range(NUM_IN_ROW - 1)]
        for copy in copies:
            trust(copy, like=part.module)
        return [part, *(replace(part, module=copy) for copy in copies)]

    def run(self, parts: Sequence[Part], choice: str) -> None:
        """Measure the cost of forward and backward.

        Args:
            parts: The unit alone, or the row.
            choice: How they run.
        """
        key = len(parts), choice
        if key in self._costs:
            return
        # The first run by "checkpoint" finds out what a unit does, and may have to begin anew.
        with torch.enable_grad(), _casting(parts[0]):
            if self.device is None:
                for _ in range(2):
                    with counting_flops() as counter:
                        self._call(parts, choice, _step)
                self._costs[key] = counter.get_total_flops
            else:
                with torch.cuda.device(self.device), uncollected():
                    if choice == "checkpoint":
                        self._call(parts, choice, _step)
                    call = partial(self._call, parts, choice)
                    self._costs[key] = self._timer.take(len(parts), call)

    def cost(self, num: int, choice: str) -> float:
        """Return the seconds on a GPU, or the FLOPs on the CPU, of units that have run.

        Args:
            num: Number of these units.
            choice: How they have run.
        """
        return float(self._costs[num, choice]())

    def count(self, parts: Sequence[Part], choice: str) -> Usage:
        """Return the bytes of forward and backward of units that have run, alone or in the row."""
        key = len(parts), choice
        if key not in self._usages:
            torch.clear_autocast_cache()
            with counting(self.device) as meter, torch.enable_grad(), _casting(parts[0]):
                self._usages[key] = self._count(parts, choice, meter)
        return self._usages[key]

    def fresh(self) -> Any:
        """Return a copy of the input that is not a leaf, so that only its users keep it alive.

        The streams may be one tensor. Their copies are two, as in other units of this kind: what is
        kept of one tensor counts once all the same, by its name.
        """
        return map_tensors(self._copy, self._x)

    def _copy(self, tensor: Tensor) -> Tensor:
        needed = self._needs and (tensor.is_floating_point() or tensor.is_complex())
        return tensor.detach().requires_grad_(needed).clone()

    def _call(self, parts: Sequence[Part], choice: str, step: Callable[..., Any]) -> None:
        """Call a function with that of the units, their input, and what gets a gradient."""
        inputs = self._x if parts[0].is_first else self.fresh()
        run, inputs = _start(parts, choice, inputs)  # without drift, as in nearly all steps
        edges = (get_gradient_edge(t) for t in tensors_of(inputs) if t.requires_grad)
        weights = [weight for part in parts for weight in part.weights]
        step(run, inputs, [*edges, *weights, *parts[0].others])

    def _count(self, parts: Sequence[Part], choice: str, meter: Meter) -> Usage:
        x = self._x
        inputs = x if parts[0].is_first else self.fresh()
        run, inputs = _start(parts, choice, inputs, checks_drift=parts[0].checks_drift)
        size = 0 if parts[0].is_first else size_of(inputs)
        entered = {address_of(tensor) for tensor in tensors_of(inputs)}
        start = meter.moment
        marks: list[int] = []
        y = run(inputs, lambda grad: marks.append(meter.moment))
        forward = meter.peak_without((), start) - size
        places = [ref(tensor.untyped_storage()) for tensor in tensors_of((inputs, y))]
        caller = {address_of(tensor) for tensor in tensors_of(x)} if parts[0].is_first else set()
        edges = [get_gradient_edge(tensor) for tensor in tensors_of(inputs) if tensor.requires_grad]
        total: Tensor = _Seed.apply(*tensors_of(y))  # type: ignore[no-untyped-call]
        del inputs, y, run
        keeps = tuple(place for place, storage in enumerate(places) if storage() is not None)
        storages = [storage for storage in (place() for place in places) if storage is not None]
        alive = {storage.data_ptr(): storage.nbytes() for storage in storages}
        # A graph may release them early, while a neighbour, or another name of one tensor, has
        # them still. What is rebuilt takes the place of others, so nobody else has those.
        if choice == "compress" or is_reversed(parts[0], choice, x):
            storages.clear()
        kept = sum(nbytes for address, nbytes in alive.items() if address not in caller)
        held = meter.bytes - kept - total.nbytes
        forward -= held + sum(n for address, n in alive.items() if address not in entered)
        weights = [weight for part in parts for weight in part.weights]
        wanted: list[Any] = [*weights, *edges, *dict.fromkeys(parts[0].others)]
        if not (total.requires_grad and wanted):  # a loss may have weights that it does not name
            return Usage(keeps, held, forward, 0)
        start = meter.moment
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        storages.clear()
        of_weights, received = grads[: len(weights)], grads[len(weights) :][: len(edges)]
        backward = meter.peak_without(of_weights, start) - held - kept
        # With overlap, there is no moment between two units.
        below = marks[0] if marks and choice != "overlap" else start
        left = meter.bytes - total.nbytes - size_of(grads)
        inside = meter.peak_without(of_weights, below)
        received = tuple(grad for grad in received if grad is not None)
        excess = _excess(received), _excess(received[:1])
        return Usage(keeps, held, forward, backward, left, inside, excess)


def is_reversed(part: Part, choice: str, x: Any) -> bool:
    """Return whether a unit rebuilds its input by this choice.

    Only couplings do. A compiled one that saves keeps its input.
    """
    if not (part.couples and choice in REVERSED):
        return False
    (keeping,) = begin_pass([resolve_strategy(choice)], [part.module], x)
    return keeping.keep == "nothing"


def _step(run: Callable[..., Any], inputs: Any, wanted: list[Any]) -> None:
    """Run forward and backward."""
    total: Tensor = _Seed.apply(*tensors_of(run(inputs, lambda _: None)))  # type: ignore[no-untyped-call]
    if total.requires_grad and wanted:
        torch.autograd.grad(total, wanted, allow_unused=True)


def _excess(tensors: Sequence[Tensor]) -> int:
    dense = [tensor for tensor in tensors if not tensor.is_sparse]
    return max(0, size_of(dense) - sum({id(t): t.nbytes for t in dense}.values()))


def _start(
    parts: Sequence[Part], choice: str, inputs: Any, *, checks_drift: bool = False
) -> tuple[Callable[[Any, Callable[[Tensor], None]], Any], Any]:
    """Return a function that runs units as a chain does, and the inputs that it takes."""
    part, strategy = parts[0], resolve_strategy(choice)
    if part.begin is not None:
        run_block = part.begin(choice)
        return (lambda x, mark: run_block(x)), inputs
    keepings = begin_pass([strategy] * len(parts), [part.module for part in parts], inputs)

    if not part.couples:
        keeping, exact = keepings[0], part.arithmetic.exact

        def run(x: Any, mark: Callable[[Tensor], None]) -> Any:
            if keeping.keep == "graph":
                return (keeping.run or part.module)(x, **part.side)
            return keep_input("unit", part.module, (x,), part.side, keeping, exact=exact)

        return run, inputs

    row = Row(["unit"] * len(parts), keepings, part.arithmetic, Mailbox())

    def run_row(streams: Any, mark: Callable[[Tensor], None]) -> Any:
        for index, part in enumerate(parts):
            if index == NUM_IN_ROW - 1 and streams[0].requires_grad:  # below the top
                streams[0].register_hook(mark)
            a, b = streams
            streams = row.couple(part.module, a, b, part.side)
        return streams

    tolerance = inf if checks_drift else None  # never a warning
    return run_row, row.enter(prepare_streams(inputs), drift_tolerance=tolerance)


def _casting(part: Part) -> AbstractContextManager[None]:
    """Cast weights as a planned chain does: its units leave no casts, and its loss may."""
    return nullcontext() if part.is_loss else uncached_casts()


class _Seed(torch.autograd.Function):
    """A number made of tensors; its backward makes gradients that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.ones(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


def wanted_of(tree: Any) -> list[Tensor]:
    """Return the tensors that get a gradient."""
    return [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
