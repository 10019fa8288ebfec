"""`backward="auto"`: the faster one of "reverse" and "overlap", timed once for every row and shape.

When a row of couplings first sees inputs of a shape, its first couplings run forward and backward
a few times by both strategies. Gradients are dropped, buffers and random state are restored; hooks
inside of f and of weights see these runs. Before a capture (gpu/capture.py) the host runs ahead of
the device in them, because a captured step does not wait for it. On the CPU the choice is
"reverse".
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from statistics import median
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from redivider._torch_private import has_saved_tensors_hooks
from redivider.arithmetic import Arithmetic
from redivider.backward.mailbox import Mailbox
from redivider.backward.row import Row
from redivider.backward.stopwatch import Stopwatch
from redivider.backward.strategy import Keeping, begin_pass, resolve_strategy
from redivider.coupling import Coupling, Streams
from redivider.replay.call import is_sharded, unhooked_graph
from redivider.replay.copies import buffers_to_spend
from redivider.tree import as_leaf, map_tensors, tensors_of

logger = logging.getLogger("redivider.auto")  # a documented name, not that of this module

CANDIDATES = ("reverse", "overlap")
MAX_RATIO = 0.99  # of the times: overlap must gain something for the memory that it takes
NUM_COUPLINGS = 6  # of a row that are timed
NUM_WARM, NUM_TIMED = 2, 5  # runs by every strategy


class Auto:
    """Choices of one chain, by row and by the shape of its streams."""

    def __init__(self) -> None:
        self.choices: dict[Any, str] = {}

    def __reduce__(self) -> Any:  # a copy of a chain may be for another device
        return Auto, ()

    def begin_row(
        self,
        units: Sequence[tuple[str, nn.Module]],
        streams: Streams,
        sides: Sequence[dict[str, Any]],
        arithmetic: Arithmetic,
    ) -> list[Keeping]:
        """Return what the couplings of a row keep in a pass on these streams.

        Args:
            units: Names and couplings of the row.
            streams: Its input.
            sides: Keywords of every coupling.
            arithmetic: Arithmetic that adds the residuals.
        """
        couplings: list[Any] = [unit for _, unit in units]
        choice, name = "reverse", units[0][0]
        if _may_overlap(couplings, streams):
            key = name, couplings[0].training, type(arithmetic), _describe(streams, sides)
            if key not in self.choices and not _is_capturing():
                times = time_row(couplings, streams, sides, arithmetic)
                self.choices[key] = faster(times)
                logger.info(
                    "backward='auto' takes %r from %s on, for streams of %s: overlap %.2f ms, "
                    "reverse %.2f ms",
                    *(self.choices[key], name, tuple(streams[0].shape)),
                    *(1000 * times[strategy] for strategy in ("overlap", "reverse")),
                )
            choice = self.choices.get(key, choice)
        return begin_pass([resolve_strategy(choice)] * len(units), couplings, streams)


@contextmanager
def before_capture() -> Iterator[None]:
    """Choose for captured steps inside, in which the device does not wait for the host."""
    global _is_before_capture
    before, _is_before_capture = _is_before_capture, True
    try:
        yield
    finally:
        _is_before_capture = before


_is_before_capture = False
_lock = Lock()  # a second thread would save buffers that the first one spends


def faster(times: dict[str, float]) -> str:
    """Return the strategy that takes less time; "reverse" if they are nearly equal."""
    return "overlap" if times["overlap"] <= MAX_RATIO * times["reverse"] else "reverse"


def time_row(
    couplings: Sequence[Coupling],
    streams: Streams,
    sides: Sequence[dict[str, Any]],
    arithmetic: Arithmetic,
) -> dict[str, float]:
    """Return seconds of forward and backward of the first couplings of a row, by strategy.

    Where memory is too short for "overlap", its time is infinite.
    """
    couplings, device = couplings[:NUM_COUPLINGS], streams[0].device
    sides = [map_tensors(as_leaf, side) for side in sides[:NUM_COUPLINGS]]
    weights = [p for coupling in couplings for p in coupling.parameters() if p.requires_grad]

    def run(strategy: str) -> None:
        keepings = begin_pass([resolve_strategy(strategy)] * len(couplings), couplings, streams)
        row = Row(["coupling"] * len(couplings), keepings, arithmetic, Mailbox())
        a, b = (tensor.detach().requires_grad_() for tensor in streams)
        wanted: list[Any] = [get_gradient_edge(a), get_gradient_edge(b), *weights]
        a, b = row.enter((a, b), drift_tolerance=None)
        for coupling, side in zip(couplings, sides, strict=True):
            a, b = row.couple(coupling, a, b, side)
        grads = torch.ones_like(a), torch.ones_like(b)
        torch.autograd.grad((a, b), wanted, grads, allow_unused=True)

    def make_watch() -> Stopwatch:
        return Stopwatch(run, on_gpu=device.type == "cuda", ahead=_is_before_capture)

    watches = {strategy: make_watch() for strategy in CANDIDATES}
    # The hooks of torch's checkpoint around the chain must not see these graphs.
    hooks = unhooked_graph() if has_saved_tensors_hooks() else nullcontext()
    modules = [module for coupling in couplings for module in coupling.modules()]
    gpu = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with _lock, gpu, rng, buffers_to_spend(modules), hooks, torch.enable_grad():
        for _ in range(NUM_WARM + NUM_TIMED):  # in turns: the clock of a GPU changes over time
            for strategy in CANDIDATES:
                if strategy in watches and not _fits(watches[strategy], strategy):
                    del watches[strategy]
    times = {strategy: median(watch.seconds[NUM_WARM:]) for strategy, watch in watches.items()}
    return dict.fromkeys(CANDIDATES, inf) | times


def _fits(watch: Stopwatch, strategy: str) -> bool:
    """Time a run; return whether memory is large enough for it, at least of "reverse"."""
    before = _num_retries()
    try:
        watch(strategy)
    except RuntimeError as error:
        if strategy == "reverse" or not is_short_of_memory(error):
            raise
        return False
    return strategy == "reverse" or _num_retries() == before


def _describe(streams: Streams, sides: Sequence[dict[str, Any]]) -> Any:
    """Return a key for runs that take the same time."""
    kind = streams[0].device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    tensors = tensors_of((streams, list(sides)))
    return _is_before_capture, autocast, *((t.shape, t.dtype, t.device) for t in tensors)


def _may_overlap(couplings: Sequence[nn.Module], streams: Streams) -> bool:
    """Return whether a row could overlap: on a GPU, with all weights in its memory.

    A rank may time a row alone, so nothing inside may wait for other ranks.
    """
    modules = [module for coupling in couplings for module in coupling.modules()]
    waits = is_sharded(modules) or any(isinstance(module, nn.SyncBatchNorm) for module in modules)
    return streams[0].is_cuda and len(couplings) > 1 and not waits


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _num_retries() -> int:
    """Return how often the allocator had to free its cache to satisfy a request."""
    retries: int = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return retries


def is_short_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation failed, in torch's allocators or in a library beside them.

    On the CPU torch raises a plain RuntimeError whose wording depends on the build. The name of the
    allocator is in both wordings that are known.
    """
    words = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
