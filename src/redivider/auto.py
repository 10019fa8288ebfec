"""`backward="auto"`: try "reverse" and "overlap" in the first steps, and keep the faster one.

Steps take turns, since a GPU's clock is not the same for long; each one's backward is timed by CUDA
events, which the host reads when they have arrived, so nothing waits. Another shape is another
trial. On the CPU there is nothing to try. A capture tries both ways by itself, whole steps.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isinf
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

WAYS = ("reverse", "overlap")
ROUNDS = 4  # of which the first warms up
ENOUGH = 0.99  # overlap must win something for the memory that it takes
NUM_TURNS, NUM_STEPS = 5, 3  # of captured steps: so many turns of so many each


class Auto:
    """The choices of one chain, by the shape of its input."""

    def __init__(self) -> None:
        self._trials: dict[Any, Trial] = {}

    def __reduce__(self) -> Any:  # a copy of a chain may be for another device
        return Auto, ()

    def settle(self, took: dict[str, float]) -> None:
        """Choose for the shapes that were forced to try, by times measured elsewhere."""
        for trial in self._trials.values():
            if trial.was_forced:
                trial.settle(took, tight=isinf(took["overlap"]))
                trial.was_forced = False

    def trial(self, x: Any, is_training: bool) -> "Trial":
        """The trial for an input like this one."""
        tensors = [each for each in tree_leaves(x) if isinstance(each, Tensor)]
        autocast = tuple(torch.is_autocast_enabled(each.device.type) for each in tensors[:1])
        key = (is_training, autocast, *((each.shape, each.dtype, each.device) for each in tensors))
        if key not in self._trials:
            on_gpu = any(each.is_cuda for each in tensors)
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
            self._trials[key] = Trial(shapes) if on_gpu else Trial(shapes, choice="reverse")
        return self._trials[key]


class Trial:
    """Which way to take for one shape."""

    def __init__(self, shapes: str, choice: str | None = None) -> None:
        self.choice = choice
        self.was_forced = False
        self._shapes = shapes
        self._running = 0  # backward passes of this chain that one call of backward() holds
        self._apart = True
        self._retries = {way: 0 for way in WAYS}
        self._timed: dict[str, list[tuple[Any, Any]]] = {way: [] for way in WAYS}

    def pick(self) -> str:
        """The way for the step that begins now."""
        way = forced()
        if way is not None:
            self.was_forced = True
            return way
        capturing = self.choice is None and torch.cuda.is_current_stream_capturing()
        if self.choice is None and not capturing:
            self._decide()
        if self.choice is not None or capturing:
            return self.choice or "reverse"
        return min(WAYS, key=lambda way: len(self._timed[way]))

    def time_backward(self, way: str, y: Any) -> None:
        """Time the backward of this output, from here to its end."""
        tensors = [each for each in tree_leaves(y) if isinstance(each, Tensor)]
        roots = [each for each in tensors if each.requires_grad]
        if self.choice is not None or forced() is not None or not roots:
            return
        if len(self._timed[way]) >= ROUNDS:
            return
        if not torch.cuda.is_current_stream_capturing():
            roots[0].register_hook(partial(self._start, way))  # type: ignore[no-untyped-call]

    def _start(self, way: str, grad: Tensor) -> None:
        start, end = timer(), timer()
        start.record()
        retries = _num_retries()
        self._running += 1
        self._apart = self._running == 1  # two of them in one backward cannot be told apart

        def finish() -> None:
            end.record()
            self._running -= 1
            if self._apart:
                self._timed[way].append((start, end))
                self._retries[way] += _num_retries() - retries

        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _decide(self) -> None:
        """Choose if all has been measured."""
        if any(len(each) < ROUNDS for each in self._timed.values()):
            return
        events = [each[1:ROUNDS] for each in self._timed.values()]
        if not all(end.query() for each in events for _, end in each):
            return
        took = [median(start.elapsed_time(end) for start, end in each) for each in events]
        self.settle(dict(zip(WAYS, took, strict=True)), tight=self._retries["overlap"] > 0)

    def settle(self, took: dict[str, float], *, tight: bool) -> None:
        """Choose by milliseconds, and say so."""
        self.choice = "reverse" if tight else faster(took)
        logger.info(
            "backward='auto' takes %r for inputs of %s: overlap %.2f ms, reverse %.2f ms%s",
            self.choice,
            self._shapes,
            took["overlap"],
            took["reverse"],
            ", memory is short" if tight else "",
        )


def faster(took: dict[str, float]) -> str:
    """The way that took less time, in milliseconds; "reverse" if it is nearly the same."""
    return "overlap" if took["overlap"] <= ENOUGH * took["reverse"] else "reverse"


def time_ways(
    run: Callable[[str], Any], ready: Callable[[str], Callable[[], Any]]
) -> dict[str, float]:
    """Milliseconds of a step in each way; one for which there is no memory takes for ever.

    Args:
        run: Does a step in one way, once. All ways do so before any of them is made ready: what is
            ready may hold memory.
        ready: Makes a step in one way, to be called again and again.
    """
    done = _as_memory_allows(WAYS, run)
    steps = _as_memory_allows(tuple(done), ready)
    spans: dict[str, list[Any]] = {way: [] for way in steps}
    for _ in range(NUM_TURNS):
        for way, step in steps.items():
            step()  # what changed hands is put in its place
            start, end = timer(), timer()
            start.record()
            for _ in range(NUM_STEPS):
                step()
            end.record()
            spans[way].append((start, end))
    end.synchronize()  # the last one
    took = {
        way: median(start.elapsed_time(end) / NUM_STEPS for start, end in each)
        for way, each in spans.items()
    }
    return dict.fromkeys(WAYS, inf) | took


def _as_memory_allows(ways: Sequence[str], do: Callable[[str], Any]) -> dict[str, Any]:
    """What is done in each way, without those that are short of memory; the first must not be."""
    found: dict[str, Any] = {}
    for way in ways:
        try:
            found[way] = do(way)
        except RuntimeError as error:
            if not found or not is_short_of_memory(error):
                raise
    return found


def is_short_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation failed, in torch's allocators or in a library beside them.

    On the CPU torch raises a plain RuntimeError whose wording depends on the build. The name of the
    allocator is in both wordings that are known.
    """
    words = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


_forced: list[str] = []


def forced() -> str | None:
    """The way that chains with "auto" must take now, if any."""
    return _forced[-1] if _forced else None


@contextmanager
def forcing(way: str) -> Iterator[None]:
    """Make all chains with "auto" take one way: a capture tries both by itself."""
    _forced.append(way)
    try:
        yield
    finally:
        _forced.pop()


def timer() -> torch.cuda.Event:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _num_retries() -> int:
    """How often the allocator had to give memory back to find some."""
    retries: int = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return retries
