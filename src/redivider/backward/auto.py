"""`backward="auto"`: time "reverse" and "overlap" in the first steps, and keep the faster one.

The two strategies alternate from step to step, because a GPU's clock changes over time. CUDA events
time every backward, and the host reads them once they have arrived, so nothing waits. Every input
shape has a trial of its own. On the CPU the choice is "reverse". A capture (gpu/capture.py) times
whole steps of both strategies itself.
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

from redivider._torch_private import after_backward
from redivider.tree import tensors_of

logger = logging.getLogger("redivider.auto")  # a documented name, not that of this module

CANDIDATES = ("reverse", "overlap")
ROUNDS = 4  # steps of every strategy, of which the first warms up
MAX_RATIO = 0.99  # of the times: overlap must gain something for the memory that it takes
NUM_TURNS, NUM_STEPS = 5, 3  # for captured steps: turns of every strategy, steps in a turn


class Auto:
    """Choices of one chain, by the shape of its input."""

    def __init__(self) -> None:
        self._trials: dict[Any, Trial] = {}

    def __reduce__(self) -> Any:  # a copy of a chain may be for another device
        return Auto, ()

    def settle(self, times: dict[str, float]) -> None:
        """Choose for the shapes that ran under `forcing`, by times measured elsewhere."""
        for trial in self._trials.values():
            if trial.was_forced:
                trial.settle(times, tight=isinf(times["overlap"]))
                trial.was_forced = False

    def trial(self, x: Any, is_training: bool) -> "Trial":
        """Return the trial for inputs like this one."""
        tensors = tensors_of(x)
        autocast = tuple(torch.is_autocast_enabled(t.device.type) for t in tensors[:1])
        key = (is_training, autocast, *((t.shape, t.dtype, t.device) for t in tensors))
        if key not in self._trials:
            on_gpu = any(t.is_cuda for t in tensors)
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            self._trials[key] = Trial(shapes) if on_gpu else Trial(shapes, choice="reverse")
        return self._trials[key]


class Trial:
    """Choice of a strategy for one input shape."""

    def __init__(self, shapes: str, choice: str | None = None) -> None:
        self.choice = choice
        self.was_forced = False
        self._shapes = shapes
        self._running = 0  # backward passes of this chain inside one call of backward()
        self._is_alone = True
        self._retries = {strategy: 0 for strategy in CANDIDATES}
        self._timed: dict[str, list[tuple[Any, Any]]] = {strategy: [] for strategy in CANDIDATES}

    def pick(self) -> str:
        """Return the strategy for the step that begins now."""
        strategy = forced()
        if strategy is not None:
            self.was_forced = True
            return strategy
        capturing = self.choice is None and torch.cuda.is_current_stream_capturing()
        if self.choice is None and not capturing:
            self._decide()
        if self.choice is not None or capturing:
            return self.choice or "reverse"
        return min(CANDIDATES, key=lambda strategy: len(self._timed[strategy]))

    def time_backward(self, strategy: str, y: Any) -> None:
        """Time the backward of this output, from its first gradient to its end."""
        roots = [tensor for tensor in tensors_of(y) if tensor.requires_grad]
        if self.choice is not None or forced() is not None or not roots:
            return
        if len(self._timed[strategy]) >= ROUNDS:
            return
        if not torch.cuda.is_current_stream_capturing():
            roots[0].register_hook(partial(self._start, strategy))  # type: ignore[no-untyped-call]

    def _start(self, strategy: str, grad: Tensor) -> None:
        start, end = timer(), timer()
        start.record()
        retries = _num_retries()
        self._running += 1
        self._is_alone = self._running == 1  # two passes in one backward cannot be timed apart

        def finish() -> None:
            end.record()
            self._running -= 1
            if self._is_alone:
                self._timed[strategy].append((start, end))
                self._retries[strategy] += _num_retries() - retries

        after_backward(finish)

    def _decide(self) -> None:
        """Choose, once every strategy has been timed and its times have arrived."""
        if any(len(spans) < ROUNDS for spans in self._timed.values()):
            return
        timed = {strategy: spans[1:ROUNDS] for strategy, spans in self._timed.items()}
        if not all(end.query() for spans in timed.values() for _, end in spans):
            return
        times = {
            strategy: median(start.elapsed_time(end) for start, end in spans)
            for strategy, spans in timed.items()
        }
        self.settle(times, tight=self._retries["overlap"] > 0)

    def settle(self, times: dict[str, float], *, tight: bool) -> None:
        """Choose by milliseconds and log the choice; `tight` memory rules out "overlap"."""
        self.choice = "reverse" if tight else faster(times)
        logger.info(
            "backward='auto' takes %r for inputs of %s: overlap %.2f ms, reverse %.2f ms%s",
            self.choice,
            self._shapes,
            times["overlap"],
            times["reverse"],
            ", memory is short" if tight else "",
        )


def faster(times: dict[str, float]) -> str:
    """Return the strategy that takes less time; "reverse" if they are nearly equal."""
    return "overlap" if times["overlap"] <= MAX_RATIO * times["reverse"] else "reverse"


def time_strategies(
    run: Callable[[str], Any], prepare: Callable[[str], Callable[[], Any]]
) -> dict[str, float]:
    """Return milliseconds of a step by strategy; infinity for one that does not fit in memory.

    Args:
        run: Runs one step with a strategy. All strategies run before any of them is prepared,
            because a prepared step may hold memory.
        prepare: Returns a step with a strategy, to be called many times.
    """
    done = _as_memory_allows(CANDIDATES, run)
    steps = _as_memory_allows(tuple(done), prepare)
    spans: dict[str, list[Any]] = {strategy: [] for strategy in steps}
    for _ in range(NUM_TURNS):
        for strategy, step in steps.items():
            step()  # not timed: it warms up, as the other strategy ran last
            start, end = timer(), timer()
            start.record()
            for _ in range(NUM_STEPS):
                step()
            end.record()
            spans[strategy].append((start, end))
    end.synchronize()  # the last event
    times = {
        strategy: median(start.elapsed_time(end) / NUM_STEPS for start, end in pairs)
        for strategy, pairs in spans.items()
    }
    return dict.fromkeys(CANDIDATES, inf) | times


def _as_memory_allows(strategies: Sequence[str], call: Callable[[str], Any]) -> dict[str, Any]:
    """Call a function for every strategy and omit those that run out of memory, but the first."""
    results: dict[str, Any] = {}
    for strategy in strategies:
        try:
            results[strategy] = call(strategy)
        except RuntimeError as error:
            if not results or not is_short_of_memory(error):
                raise
    return results


def is_short_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation failed, in torch's allocators or in a library beside them.

    On the CPU torch raises a plain RuntimeError whose wording depends on the build. The name of the
    allocator is in both wordings that are known.
    """
    words = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


_forced: list[str] = []


def forced() -> str | None:
    """Return the strategy that chains with "auto" must use now, if any."""
    return _forced[-1] if _forced else None


@contextmanager
def forcing(strategy: str) -> Iterator[None]:
    """Make all chains with "auto" use one strategy: a capture times both itself."""
    _forced.append(strategy)
    try:
        yield
    finally:
        _forced.pop()


def timer() -> torch.cuda.Event:
    """Return a CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _num_retries() -> int:
    """Return how often the allocator had to free its cache to satisfy a request."""
    retries: int = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return retries
