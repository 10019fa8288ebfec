"""Bytes and cost of every choice for every unit, measured once for every kind of unit.

A unit runs by itself, on an input like its own, as its chain would run it. Tensors that enter and
leave it are counted apart: they lie between units, and neighbours may share them (solve.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from redivider._torch_private import compiled_call
from redivider.arithmetic import Arithmetic
from redivider.backward.mailbox import Mailbox
from redivider.backward.node import keep_input
from redivider.backward.offload import NUM_LEAVING
from redivider.backward.row import Row, prepare_streams
from redivider.backward.saving import Saving
from redivider.backward.stopwatch import Stopwatch
from redivider.backward.strategy import begin_pass, resolve_strategy
from redivider.budget.kind import describe, kind_of_module
from redivider.budget.meter import Meter, counting, gpu_of, size_of
from redivider.budget.solve import Key, Option, Peak, Problem
from redivider.chain import Chain, name_unit, taken
from redivider.checks.flops import counting_flops
from redivider.checks.restore import restored
from redivider.coupling import Coupling
from redivider.errors import UnitError, naming
from redivider.replay import Call
from redivider.replay.autocast import uncached_casts
from redivider.tree import map_tensors, tensors_of

NUM_TIMED = 2  # runs, of which the faster one counts
NUM_IN_ROW = 3  # equal couplings in a row that is timed
REVERSED = ("reverse", "overlap", "save")
ON_GPU = ("offload", "overlap")
ON_HOST = ("offload", "offload-save")
# Choices for junctions, couplings, and blocks of `rd.make_reversible`; `_inside` has more.
JUNCTION = ("store", "checkpoint", "offload")
COUPLING = (*JUNCTION, "reverse", "overlap")
BLOCK = (*JUNCTION, "compress")


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
    """All bytes in the backward of the couplings below the top, of three."""
    excess: tuple[int, int] = (0, 0)
    """Bytes of the memory in which gradients of its input lie beyond their own: of all, and of the
    first one, which passes through a coupling below."""


@dataclass(frozen=True)
class Measured:
    """Usage and added cost of every choice, for one kind of unit."""

    usages: dict[str, Usage]
    costs: dict[str, float]
    inner: dict[str, Usage]
    """Usage of a reversed coupling that is not the top of its run."""


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

    def choices(self, is_cuda: bool) -> list[str]:
        """Return the names of the choices that there are for it."""
        if self.is_loss:
            return ["store"]
        names = BLOCK if self.begin is not None else COUPLING if self.couples else JUNCTION
        refused = [*(() if is_cuda else ON_GPU), *(("offload",) if self.is_captured else ())]
        return [name for name in names if name not in refused]

    @property
    def weights(self) -> list[Tensor]:
        """Parameters that get a gradient."""
        params = self.module.parameters() if isinstance(self.module, nn.Module) else ()
        return [param for param in params if param.requires_grad]

    @property
    def others(self) -> list[Tensor]:
        """Tensors beside its input, as keywords, that get a gradient."""
        return wanted_of((self.args, self.side))


def measure(
    chain: Chain,
    x: Any,
    side: dict[str, Any],
    loss: Callable[[Any], Any],
    *,
    is_captured: bool = False,
) -> Problem:
    """Measure all units of a chain, and the loss above them.

    Args:
        chain: The chain.
        x: Its input.
        side: Its keywords.
        loss: A function from its output to tensors.
        is_captured: Whether the step is captured.
    """
    arithmetic = chain.arithmetic
    checks_drift = chain.training and chain.check_every > 0
    parts = [
        Part(
            unit,
            taken(unit, side),
            arithmetic,
            is_captured=is_captured,
            checks_drift=checks_drift,
        )
        for unit in chain
    ]
    parts = [replace(parts[0], is_first=True), *parts[1:], Part(loss, {}, arithmetic, is_loss=True)]
    keys: dict[int, Key] = {address_of(tensor): ("x", i) for i, tensor in enumerate(tensors_of(x))}
    sizes: dict[Key, int] = dict.fromkeys(keys.values(), 0)  # the caller's
    needs = bool(wanted_of(x))
    known: dict[Any, Measured] = {}
    units, left, in_row = [], 0, False
    with restored(nn.ModuleList([chain, *([loss] if isinstance(loss, nn.Module) else [])])):
        for index, part in enumerate(parts):
            with naming("the loss" if part.is_loss else name_unit(index, part.module)):
                if part.couples and not in_row:
                    x = _enter(x, arithmetic)
                kind, shared = kind_of(part, x, needs), share_memory(x)
                if (kind, shared) not in known:
                    twin = known.get((kind, not shared))
                    known[kind, shared] = measure_part(part, x, needs, twin)
                with torch.no_grad():
                    y = part.module(x, **part.side)
            measured, in_row = known[kind, shared], part.couples
            entering = name_tensors(x, keys, sizes, (index, "in"))
            leaving = name_tensors(y, keys, sizes, (index, "out"))
            if part.couples:
                # What is kept of a pair beside the streams: their form on a grid, and a
                # fingerprint, with which the rebuilt pair is compared to find drift.
                own = measured.usages["reverse"].held - measured.inner["reverse"].held
                sizes[index, "pair"] = own
            units.append(list(make_options(measured, entering, leaving, (index, "pair"))))
            excess = [
                max(own) for own in zip(*(u.excess for u in measured.usages.values()), strict=True)
            ]
            add_excess(units, excess, [own.couples for own in parts])
            left += max(usage.left for usage in measured.usages.values())
            needs = needs or bool(part.weights or part.others)
            keys = dict(zip(map(address_of, tensors_of(y)), leaving, strict=True))
            x = y
    # Below the loss are its numbers and their gradients; a unit is measured with one of 4 bytes.
    extra = 2 * max(0, size_of(x) - torch.float32.itemsize)
    units[:-1] = [_with_backward(own, extra) for own in units[:-1]]
    _add_shared(units, parts)
    _add_keywords(units, parts)
    return Problem(units, sizes, left)


def make_options(
    measured: Measured, entering: list[Key], leaving: list[Key], pair: Key
) -> Iterator[Option]:
    """Yield the options of a unit, with the names of the tensors around it."""
    places = [*entering, *leaving]
    for choice, usage in measured.usages.items():
        kept = tuple(dict.fromkeys(places[place] for place in usage.keeps))
        peaks = (Peak(tuple(entering), usage.forward), Peak((), usage.backward))
        cost, inner = measured.costs[choice], measured.inner.get(choice)
        if inner is None:
            yield Option(choice, cost, usage.held, kept, peaks)
        else:
            forward = usage.forward + usage.held - inner.held
            inside = (Peak((*entering, *kept), forward), Peak((), inner.backward))
            yield Option(choice, cost, inner.held, (), inside, pair=(*kept, pair), top=peaks)


def add_excess(units: list[list[Option]], excess: Sequence[int], couples: Sequence[bool]) -> None:
    """Add to the units below the last one what gradients from it hold beyond their own bytes.

    Halves of one gradient share its memory, until both are gone. The first one goes to the unit
    below, and through a coupling to the next one.
    """
    last = len(units) - 1
    for index, extra in zip((last - 1, last - 2), excess, strict=True):
        if extra and index >= 0 and (index == last - 1 or couples[last - 1]):
            units[index] = _with_backward(units[index], extra)


def _add_shared(units: list[list[Option]], parts: Sequence[Part]) -> None:
    """Add to the units below a user of a weight its gradient, which waits for that of lower users.

    A lower user adds its own to it.
    """
    users: dict[Tensor, list[int]] = {}
    for index, part in enumerate(parts):
        for weight in part.weights:
            users.setdefault(weight, []).append(index)
    for weight, indices in users.items():
        for index in range(indices[0], indices[-1]):
            extra = weight.nbytes * (2 if index in indices else 1)
            units[index] = _with_backward(units[index], extra)


def _add_keywords(units: list[list[Option]], parts: Sequence[Part]) -> None:
    """Add to the units below a user of a keyword its gradient, which stays to the end."""
    users: dict[Tensor, list[int]] = {}
    for index, part in enumerate(parts):
        for tensor in dict.fromkeys(part.others):
            users.setdefault(tensor, []).append(index)
    for tensor, indices in users.items():
        for index in range(indices[-1]):
            # A lower user makes a sum of this gradient and its own, while both are there.
            extra = tensor.nbytes * (2 if index in indices else 1)
            units[index] = _with_backward(units[index], extra)


def _with_backward(options: Sequence[Option], extra: int) -> list[Option]:
    """Return options whose backward takes more bytes."""
    return [
        replace(
            option,
            peaks=tuple(_raised(option.peaks, extra)),
            top=tuple(_raised(option.top, extra)),
        )
        for option in options
    ]


def _raised(peaks: Sequence[Peak], extra: int) -> Iterator[Peak]:
    """Yield the peaks of a forward and a backward, the second one raised."""
    for place, peak in enumerate(peaks):
        yield peak._replace(extra=peak.extra + (extra if place else 0))


def measure_part(part: Part, x: Any, needs: bool, twin: Measured | None = None) -> Measured:
    """Measure one kind of unit by all choices that there are for it.

    Args:
        part: A unit of this kind.
        x: Its input.
        needs: Whether its input gets a gradient.
        twin: Measurements of a unit that takes as long.
    """
    device = gpu_of(x)
    choices = part.choices(device is not None)
    if not part.is_loss:
        choices += _inside(part, x, needs, device)
    usages: dict[str, Usage] = {}
    inner: dict[str, Usage] = {}
    for choice in choices:
        try:
            usages[choice], below = _use_by(part, choice, x, needs, device)
        except UnitError:  # some units can only be stored, as one that writes into its input
            if choice == "store":
                raise
            continue
        if below is not None:
            inner[choice] = below
    if twin is not None and twin.costs.keys() == usages.keys():
        return Measured(usages, twin.costs, inner)
    costs = measure_costs(part, usages, x, needs, device)
    costs = {choice: max(0.0, cost - costs["store"]) for choice, cost in costs.items()}
    return Measured(usages, costs, inner)


def _use_by(
    part: Part, choice: str, x: Any, needs: bool, device: torch.device | None
) -> tuple[Usage, Usage | None]:
    """Return the usage of a choice, and for a reversed coupling that below the top of its run."""
    if choice in ON_HOST:
        return _use_on_host(part, choice, x, needs, device), None
    usage = _use([part], choice, x, needs, device)
    if choice not in REVERSED or not _is_reversed(part, choice, x):
        return usage, None
    # The lowest coupling of a run need not rebuild its input, so it takes three to have one inside.
    # Copies have gradients of their own.
    above = [replace(part, module=deepcopy(part.module)) for _ in range(2)]
    run = _use([part, *above], choice, x, needs, device)
    held = (run.held - usage.held) // 2
    # Below the top there are two, and the lower one needs no more than the other.
    below = replace(run, held=held, backward=run.inside - 2 * held)
    return replace(usage, backward=run.backward), below


def _use_on_host(
    part: Part, choice: str, x: Any, needs: bool, device: torch.device | None
) -> Usage:
    """Return the usage of a unit in a chain of others whose tensors wait on the host.

    Alone, its tensors would not leave the device. In a chain, those of a few others are on their
    way to the host, or back.
    """
    usage = _use([part], "checkpoint", x, needs, device)
    saved = 0
    if choice == "offload-save":
        inputs_alone, usage = usage.held, _use([part], choice, x, needs, device)
        saved = usage.held - inputs_alone
    leaving = size_of(x) + saved
    return replace(
        usage,
        keeps=(),
        held=usage.held - saved,
        forward=usage.forward + saved + NUM_LEAVING * leaving,
        backward=usage.backward + (NUM_LEAVING + 1) * leaving,
    )


def _inside(part: Part, x: Any, needs: bool, device: torch.device | None) -> list[str]:
    """Return the choices for what is kept inside of a unit.

    Those of compiled units can only be measured on a GPU: counters see no compiled code. Compiled
    blocks have none.
    """
    inputs = _fresh(x, needs)
    module, args = part.module, (inputs, *part.args)
    if part.couples:
        module, args = module.f, inputs[:1]
    if part.begin is None and hasattr(compiled_call(module), "run_saving"):
        return [] if device is None else ["save", "trim"]
    call, _ = Call.split(module, args, part.side)
    if any(compiled_call(own) is not None for own in call.modules):
        return []
    saving = Saving(call)
    try:
        with torch.enable_grad():
            saving.record(*args, **part.side)
    except UnitError:
        return []
    if not saving.num_tensors:  # then it would be as "reverse" or "checkpoint"
        return []
    offloads = device is not None and not part.is_captured
    return ["save", *["offload-save"] * offloads]


def _is_reversed(part: Part, choice: str, x: Any) -> bool:
    """Return whether a coupling rebuilds its input by this choice; compiled ones do not save so."""
    (keeping,) = begin_pass([resolve_strategy(choice)], [part.module], x)
    return keeping.keep == "nothing"


def _use(
    parts: Sequence[Part], choice: str, x: Any, needs: bool, device: torch.device | None
) -> Usage:
    """Run a unit, or three couplings in a row, forward and backward, and count bytes."""
    for _ in range(2):  # the first run verifies modules, compiles them, and makes workspaces
        torch.clear_autocast_cache()
        with counting(device) as meter, torch.enable_grad(), _casting(parts[0]):
            usage = _use_once(parts, choice, x, needs, meter)
    return usage


def _use_once(parts: Sequence[Part], choice: str, x: Any, needs: bool, meter: Meter) -> Usage:
    inputs = x if parts[0].is_first else _fresh(x, needs)
    run, inputs = _start(parts, choice, inputs)
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
    alive = {s.data_ptr(): s.nbytes() for s in (place() for place in places) if s is not None}
    kept = sum(nbytes for address, nbytes in alive.items() if address not in caller)
    held = meter.bytes - kept - total.nbytes
    forward -= held + sum(n for address, n in alive.items() if address not in entered)
    weights = [weight for part in parts for weight in part.weights]
    wanted: list[Any] = [*weights, *edges, *dict.fromkeys(parts[0].others)]
    if not (total.requires_grad and wanted):  # a loss may have weights that it does not name
        return Usage(keeps, held, forward, 0)
    start = meter.moment
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    of_weights, received = grads[: len(weights)], grads[len(weights) :][: len(edges)]
    backward = meter.peak_without(of_weights, start) - held - kept
    # With overlap, there is no moment between two units.
    below = marks[0] if marks and choice != "overlap" else start
    left = meter.bytes - total.nbytes - size_of(grads)
    inside = meter.peak_without(of_weights, below)
    received = tuple(grad for grad in received if grad is not None)
    excess = _excess(received), _excess(received[:1])
    return Usage(keeps, held, forward, backward, left, inside, excess)


def _excess(tensors: Sequence[Tensor]) -> int:
    dense = [tensor for tensor in tensors if not tensor.is_sparse]
    return max(0, size_of(dense) - sum({id(t): t.nbytes for t in dense}.values()))


def _start(
    parts: Sequence[Part], choice: str, inputs: Any
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
            if index == 2 and streams[0].requires_grad:  # below the top
                streams[0].register_hook(mark)
            a, b = streams
            streams = row.couple(part.module, a, b, part.side)
        return streams

    tolerance = inf if part.checks_drift else None  # never a warning
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


def measure_costs(
    part: Part, choices: Iterable[str], x: Any, needs: bool, device: torch.device | None
) -> dict[str, float]:
    """Return the seconds of forward and backward of a unit on a GPU; on the CPU the FLOPs."""
    num = NUM_IN_ROW if part.couples else 1
    part = replace(part, checks_drift=False)  # as nearly all steps

    def step(run: Callable[..., Any], inputs: Any, wanted: list[Any]) -> None:
        total: Tensor = _Seed.apply(*tensors_of(run(inputs, lambda _: None)))  # type: ignore[no-untyped-call]
        if total.requires_grad and wanted:
            torch.autograd.grad(total, wanted, allow_unused=True)

    def call(step: Callable[..., Any], choice: str) -> None:
        run, inputs = _start([part] * num, choice, x if part.is_first else _fresh(x, needs))
        edges = (get_gradient_edge(t) for t in tensors_of(inputs) if t.requires_grad)
        step(run, inputs, [*edges, *part.weights, *part.others])

    def count(choice: str) -> float:
        with counting_flops() as counter:
            call(step, choice)
        return float(counter.get_total_flops()) / num

    with torch.enable_grad(), _casting(part):
        if device is None:
            return {choice: count(choice) for choice in choices}
        with torch.cuda.device(device):
            # One watch: by the host's time for one choice it lets the host run ahead for the next.
            watch = Stopwatch(step, on_gpu=True, ahead=part.is_captured)
            call(watch, "store")
            return {choice: _time(call, watch, choice) / num for choice in choices}


def _time(call: Callable[[Stopwatch, str], None], watch: Stopwatch, choice: str) -> float:
    for _ in range(NUM_TIMED):
        call(watch, choice)
    return min(watch.seconds[-NUM_TIMED:])


def _fresh(x: Any, needs: bool) -> Any:
    """Return a copy that is not a leaf, so that only its users keep it alive."""
    copies: dict[Tensor, Tensor] = {}  # the streams may be one tensor

    def copy(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            needed = needs and (tensor.is_floating_point() or tensor.is_complex())
            leaf = tensor.detach().requires_grad_(needed)
            copies[tensor] = leaf.clone()
        return copies[tensor]

    return map_tensors(copy, x)


def _enter(x: Any, arithmetic: Arithmetic) -> Any:
    """Return streams as the first coupling of a row gets them."""
    with torch.no_grad():
        a, b = prepare_streams(x)
        if not arithmetic.exact:
            return a, b
        return tuple(arithmetic.real(arithmetic.store(t).stored, t.dtype) for t in (a, b))


def kind_of(part: Part, x: Any, needs: bool) -> Any:
    """Return a key that units share if they differ only in the values of their weights."""
    key = (describe((x, part.side)), needs, part.is_first)
    if part.is_loss or not isinstance(part.module, nn.Module):
        return key, id(part.module)
    return key, kind_of_module(part.module)


def share_memory(tree: Any) -> bool:
    """Return whether some tensors lie in the same memory."""
    tensors = tensors_of(tree)
    return len({address_of(tensor) for tensor in tensors}) < len(tensors)


def name_tensors(
    x: Any, keys: dict[int, Key], sizes: dict[Key, int], prefix: tuple[Any, ...]
) -> list[Key]:
    """Return a key for every tensor, by its memory; new ones get their size."""
    named = []
    for number, tensor in enumerate(tensors_of(x)):
        key = keys.setdefault(address_of(tensor), (*prefix, number))
        sizes.setdefault(key, tensor.untyped_storage().nbytes())
        named.append(key)
    return named


def differentiate(loss: Any, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of the tensors of a loss."""
    losses = wanted_of(loss)
    if not losses or not wanted:
        raise ValueError("the loss has no gradient; is all of the model frozen?")
    return torch.autograd.grad(losses, wanted, allow_unused=True)


def wanted_of(tree: Any) -> list[Tensor]:
    """Return the tensors that get a gradient."""
    return [tensor for tensor in tensors_of(tree) if tensor.requires_grad]


def address_of(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor."""
    return int(tensor.untyped_storage().data_ptr())
