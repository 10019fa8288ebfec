"""Recording and replay of work on several lanes: on a GPU, CUDA graphs with one branch per lane.

Work may be cut into parts, between which the host does what a graph cannot hold:

    fork    lanes    join    main    cut    fork    lanes    join    cut
    |---------- first part ----------|      |------ second part -----|
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias, TypeVar

import torch

from redivider.gpu.cuda_graph import capturing

Result = TypeVar("Result")
Replay: TypeAlias = Callable[[], None]

NUM_PER_PRIORITY = 32  # distinct CUDA streams that torch's pool has for each priority
NUM_PRIORITIES = 4  # of torch's pools: 0, and -3 for what goes first


class Graphs(ABC):
    """Recorder of work on several lanes.

    Lanes run side by side between `fork` and `join`, except where one waits for another.
    """

    @abstractmethod
    def lane(self, index: int) -> AbstractContextManager[Any]:
        """Return a context whose work goes to a lane."""

    @abstractmethod
    def prefer(self, lanes: Collection[int]) -> None:
        """Let these lanes go first where lanes compete, until the next call."""

    @abstractmethod
    def fork(self) -> None:
        """Start all lanes after the work so far; begin a part, if none has begun."""

    @abstractmethod
    def wait(self, lane: int, other: int) -> None:
        """Order the next work on a lane after the work so far on another lane."""

    @abstractmethod
    def join(self) -> None:
        """Order the next work after all lanes."""

    @abstractmethod
    def cut(self) -> Replay | None:
        """End a part; return a function that replays it, or None if none has begun."""

    @abstractmethod
    def record(self, run: Callable[[], Result]) -> Result:
        """Call a function that records parts, and ends each."""


class CudaGraphs(Graphs):
    """CUDA graphs that share one memory pool, with one branch per lane."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        self._device = device
        # Beyond the pool of one priority torch hands out the same streams again, and two lanes
        # would share one: so take further lanes from the next priority.
        pools = [index // NUM_PER_PRIORITY for index in range(num_lanes + 1)]
        self._main, *self._usual = (_stream(device, pool) for pool in pools)
        self._streams = self._preferred = self._usual
        if pools[-1] < NUM_PRIORITIES / 2:  # else there are too few pools
            first = NUM_PRIORITIES - 1
            self._preferred = [_stream(device, first - pool) for pool in pools[1:]]
        gc.collect()  # frees the memory of dropped graphs before new ones are captured
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture = ExitStack()

    def lane(self, index: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[index])

    def prefer(self, lanes: Collection[int]) -> None:
        # Kernels of a graph keep the priority of the stream on which they were captured.
        pairs = enumerate(zip(self._usual, self._preferred, strict=True))
        self._streams = [pair[lane in lanes] for lane, pair in pairs]

    def fork(self) -> None:
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            self._capture.enter_context(capturing(self._graph, self._main, self._pool))
        for stream in self._streams:
            stream.wait_stream(self._main)

    def wait(self, lane: int, other: int) -> None:
        if lane != other:
            self._streams[lane].wait_stream(self._streams[other])

    def join(self) -> None:
        for stream in self._streams:
            self._main.wait_stream(stream)

    def cut(self) -> Replay | None:
        graph, self._graph = self._graph, None
        if graph is None:
            return None
        self._capture.close()
        return graph.replay

    def record(self, run: Callable[[], Result]) -> Result:
        torch.cuda.synchronize(self._device)
        with self._capture:  # a capture that fails ends here
            return run()


def _stream(device: torch.device, pool: int) -> torch.cuda.Stream:
    """Return a CUDA stream; those of a higher pool go first."""
    return torch.cuda.Stream(device, priority=-pool)  # type: ignore[no-untyped-call]
