"""Bytes and cost of every choice for the blocks of a network of `rd.make_reversible`.

A block is measured by itself, in the middle of a forward, with the arguments that it gets there.
What surrounds the blocks (embeddings, norms, head, loss) is fixed. Its bytes are those of a step
whose blocks keep nothing:

    bytes, at every moment  =  those of that step  +  those that blocks hold  +  those of one block
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from redivider.arithmetic import resolve_arithmetic
from redivider.backward.node import KeptInput
from redivider.backward.strategy import resolve_strategy
from redivider.budget.kind import describe
from redivider.budget.measure import (
    add_excess,
    differentiate,
    kind_of,
    make_options,
    name_tensors,
)
from redivider.budget.meter import Meter, address_of, counting, gpu_of, size_of
from redivider.budget.problem import Key, Option, Peak, Problem
from redivider.budget.trial import Part, Run, Timer, wanted_of
from redivider.budget.unit import Measured, measure_part
from redivider.checks.restore import restored
from redivider.convert.reversible import Blocks, Keepers, Observe, blocks_of
from redivider.replay import Call
from redivider.tree import map_tensors, tensors_of

COMPRESS = resolve_strategy("compress")


def measure_blocks(
    model: nn.Module,
    x: Any,
    side: dict[str, Any],
    loss: Callable[[Any], Any],
    *,
    is_captured: bool = False,
) -> tuple[list[str], Problem]:
    """Measure the blocks of a network, and what surrounds them.

    Args:
        model: The network.
        x: Its input; None if it takes keywords alone.
        side: Its keywords.
        loss: A function from its output to tensors.
        is_captured: Whether the step is captured.

    Returns:
        The names of the blocks, in the order in which they run, and the problem, whose last unit is
        what follows the blocks.
    """
    names = {place: name for name, place in blocks_of(model).items()}
    lists = [blocks for blocks, _ in names]
    inputs = () if x is None else (x,)
    module = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    others = wanted_of((x, side))
    device = gpu_of((x, side))
    kinds = _Kinds(is_captured)
    with restored(module), torch.enable_grad():
        with observed(lists, kinds):
            model(*inputs, **side)
        if not kinds.measured:
            raise ValueError(
                "no reversible block was trained: call model.train() before rd.plan, and do not "
                "freeze all blocks"
            )
        for _ in range(2):  # the first step makes workspaces
            torch.clear_autocast_cache()
            with counting(device, weights) as meter:
                around = _Around(meter)
                with observed(lists, around):
                    grads = differentiate(loss(model(*inputs, **side)), [*weights, *others])
                problem = around.problem(kinds.measured, grads[: len(weights)])
    return [names[place] for place in kinds.measured], problem


@contextmanager
def observed(lists: Sequence[Blocks], observe: Observe) -> Iterator[None]:
    """Let a function run the blocks of some lists, inside."""
    try:
        for blocks in lists:
            blocks.observe = observe
        yield
    finally:
        for blocks in lists:
            blocks.observe = None


class _Kinds:
    """Observer that measures every kind of block once."""

    def __init__(self, is_captured: bool) -> None:
        self._is_captured = is_captured
        self._timer = Timer(is_captured=is_captured)
        self.measured: dict[tuple[Blocks, int], Measured] = {}
        """Measurements of the blocks, in the order in which they run."""
        self._known: dict[Any, Measured] = {}

    def __call__(
        self, blocks: Blocks, index: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if (blocks, index) in self.measured:
            raise ValueError(
                f"{blocks.names[index]} runs twice in a forward, and a plan has one choice for it"
            )
        own, keywords = map_tensors(_detached, (args, kwargs))
        begin = _beginner(blocks, index, x, own, keywords)
        part = Part(
            blocks.plain[index],
            keywords,
            resolve_arithmetic("float"),
            args=own,
            begin=begin,
            is_captured=self._is_captured,
        )
        # Blocks of another list may keep another number of bits.
        kind = kind_of(part, x, x.requires_grad), describe((args, kwargs)), blocks
        if kind not in self._known:
            self._known[kind] = measure_part(part, x, x.requires_grad, self._timer)
        self.measured[blocks, index] = self._known[kind]
        call, inputs = Call.split(blocks.plain[index], (x, *args), kwargs)
        return _Hollow(call).run(inputs)


def _beginner(
    blocks: Blocks, index: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[str], Run]:
    """Return a function from a choice to a function that runs a block by it."""
    # Blocks of a pass share a tape. It begins here, with an input, so that its memory does not
    # count as that of the block.
    tapes: Any = blocks.make_keeper(COMPRESS, x)
    tapes.tape_for(x).append(x)

    def begin(choice: str) -> Run:
        owned = [tapes.restart()]
        keepers = Keepers({COMPRESS: owned[0]})

        def run(x: Tensor) -> Any:
            tapes = owned.pop()  # from now on, what the block keeps holds it
            output = blocks.run_by(choice, index, keepers, x, args, kwargs)
            del tapes
            return output

        return run

    return begin


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass
class _Visit:
    """Moments of a block in a step whose blocks keep nothing."""

    entering: list[Key]
    tape: Key
    """Input that the tape knows, if the block is compressed."""
    leaving: list[Key] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes when it begins."""
    alive: tuple[Key, ...] = ()
    """Tensors between blocks that are among them."""
    forward: tuple[int, int] = (0, 0)
    """Moments between which it runs."""
    backward: tuple[int, int] | None = None
    passing: int = 0
    """Bytes of the gradients that enter and leave it."""
    alive_backward: tuple[Key, ...] = ()


class _Hollow(KeptInput):
    """State of a block that keeps nothing of its own, and whose gradients are zeros.

    Args:
        call: Call of the block.
        around: Observer of its backward.
        visit: Moments of the block, to be completed.
    """

    returns_others = True

    def __init__(
        self, call: Call, around: "_Around | None" = None, visit: _Visit | None = None
    ) -> None:
        super().__init__("block", call, with_graph=False)
        self._around, self._visit = around, visit
        self._like: list[Any]  # shapes, dtypes and devices of the arguments

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        num_arguments = len(tensors) - len(self._call.parameters)
        self._like = [(t.shape, t.dtype, t.device) for t in tensors[:num_arguments]]
        output = map_tensors(Tensor.detach, self._call.run_plainly(tensors))
        # All blocks keep what else they take, such as a mask: it belongs to the surroundings.
        return self.split_output(output), tensors[1:num_arguments]

    def prepare(self, saved: Sequence[Tensor], needs: Sequence[bool], *, flows: bool) -> None:
        return None

    def finish(
        self, prepared: Any, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        around, visit = self._around, self._visit
        start = 0 if around is None else around.meter.moment
        made = [
            torch.zeros(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in zip(self._like, needs, strict=False)
        ]
        if around is not None and visit is not None:
            visit.backward = start, around.meter.moment
            visit.passing = size_of((*grads, *made))
            visit.alive_backward = around.alive(visit)
        return [*made, *[None] * (len(needs) - len(made))]


class _Around:
    """Observer of a step whose blocks keep nothing.

    Args:
        meter: Counter of bytes, which counts those of the step.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._visits: dict[tuple[Blocks, int], _Visit] = {}
        self._sizes: dict[Key, int] = {}
        self._storages: dict[Key, Any] = {}
        self._outputs: dict[int, Key] = {}  # of the last block, by address

    def __call__(
        self, blocks: Blocks, index: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        number = len(self._visits)
        known = {a: key for a, key in self._outputs.items() if self._storages[key]() is not None}
        entering = self._name(x, known, (number, "in"))
        tape = ("tape", id(blocks), x.shape, x.dtype)
        self._sizes[tape] = x.numel() * torch.promote_types(x.dtype, torch.float32).itemsize
        visit = self._visits[blocks, index] = _Visit(entering, tape)
        visit.num_bytes, visit.alive = self.meter.bytes, self.alive(visit)
        start = self.meter.moment
        call, inputs = Call.split(blocks.plain[index], (x, *args), kwargs)
        output = _Hollow(call, self, visit).run(inputs)
        self._outputs = {address_of(x): entering[0]}
        visit.leaving = self._name(output, self._outputs, (number, "out"))
        visit.forward = start, self.meter.moment
        return output

    def _name(self, tree: Any, known: dict[int, Key], prefix: tuple[Any, ...]) -> list[Key]:
        keys = name_tensors(tree, known, self._sizes, prefix)
        for key, tensor in zip(keys, tensors_of(tree), strict=True):
            self._storages.setdefault(key, ref(tensor.untyped_storage()))
        return keys

    def alive(self, visit: _Visit) -> tuple[Key, ...]:
        """Return the tensors that enter and leave a block, or enter the first, and still exist.

        Others that exist count as bytes of the surroundings. Many models refer to the input of the
        first block in all of their forward.
        """
        first = next(iter(self._visits.values()))
        keys = dict.fromkeys((*first.entering, *visit.entering, *visit.leaving))
        return tuple(key for key in keys if self._storages[key]() is not None)

    def problem(self, measured: Mapping[Any, Measured], grads: Sequence[Tensor | None]) -> Problem:
        """Return the problem of choices for all blocks, and a last unit for what follows them."""
        visits = list(self._visits.values())
        above = self._peaks_between(visits, grads)
        units: list[list[Option]] = []
        left = 0
        for number, (place, visit) in enumerate(self._visits.items()):
            own, options = measured[place], []
            for option in make_options(own, visit.entering, visit.leaving, (number, "pair")):
                forward, backward = option.peaks
                keeps = (*option.keeps, *[visit.tape] * (option.choice == "compress"))
                peaks = [
                    self._peak(visit.alive, visit.num_bytes + forward.extra),
                    Peak((), backward.extra),
                    *above[number],
                ]
                if visit.backward is not None:
                    num_bytes = self.meter.peak_without(grads, *visit.backward) - visit.passing
                    peaks[1] = self._peak(visit.alive_backward, num_bytes + backward.extra)
                if not number:
                    # Before the first block begins, and after it has ended, no block holds bytes.
                    held = option.held + sum(self._sizes[key] for key in keeps)
                    peaks += [Peak((), peak.extra - held) for peak in above[-1]]
                options.append(replace(option, keeps=keeps, peaks=tuple(peaks)))
            units.append(options)
            pairs = zip(*(usage.excess for usage in own.usages.values()), strict=True)
            add_excess(units, [max(pair) for pair in pairs], [False] * len(visits))
            left += max(usage.left for usage in own.usages.values())
        units.append([Option("store", 0.0, 0, (), tuple(above[len(visits) - 1]))])
        return Problem(units, self._sizes, left)

    def _peak(self, alive: Sequence[Key], num_bytes: int) -> Peak:
        """Return a peak in which some of the bytes are those of tensors between blocks."""
        return Peak(tuple(alive), num_bytes - sum(self._sizes[key] for key in alive))

    def _peaks_between(
        self, visits: Sequence[_Visit], grads: Sequence[Tensor | None]
    ) -> dict[int, list[Peak]]:
        """Return the peaks above every block, by its index, and those below the first at -1."""
        peaks: dict[int, list[Peak]] = {number: [] for number in range(-1, len(visits))}
        first = visits[0].entering

        def add(number: int, since: int, until: int | None, alive: Sequence[Key]) -> None:
            # What existed before and exists at the end existed at the peak.
            known = [key for key in alive if key in first and number >= 0]
            num_bytes = self.meter.peak_without(grads, since, until)
            peaks[number].append(self._peak(known, num_bytes))

        moment = 0
        for number, visit in enumerate(visits):
            add(number - 1, moment, visit.forward[0], visit.alive)
            moment = visit.forward[1]
        top = len(visits) - 1
        for number, visit in reversed(list(enumerate(visits))):
            if visit.backward is not None:
                add(top, moment, visit.backward[0], visit.alive_backward)
                moment, top = visit.backward[1], number - 1
        add(top, moment, None, ())
        return peaks
