"""Work on several lanes, recorded once and replayed: on a GPU, CUDA graphs with a branch a lane."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from redivider.graph import capturing

NUM_PER_PRIORITY = 32  # CUDA streams that torch has to give, for each priority


class Graphs(ABC):
    """Records work on several lanes, to be replayed."""

    @abstractmethod
    def lane(self, index: int) -> AbstractContextManager[Any]:
        """Where the work of a lane goes."""

    @abstractmethod
    def fork(self) -> None:
        """Let all lanes come after what was done so far."""

    @abstractmethod
    def wait(self, lane: int, other: int) -> None:
        """Let what follows on a lane come after what another one has done so far."""

    @abstractmethod
    def join(self) -> None:
        """Let what follows come after all lanes."""

    @abstractmethod
    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record what a function does; return what replays it, and what it returned."""


class CudaGraphs(Graphs):
    """CUDA graphs that share their memory, each lane a branch."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        self._device = device
        self._main, *self._streams = (
            torch.cuda.Stream(  # type: ignore[no-untyped-call]
                device, priority=-(number // NUM_PER_PRIORITY)
            )
            for number in range(num_lanes + 1)
        )
        gc.collect()  # the memory of graphs that are gone
        self._pool = torch.cuda.graph_pool_handle()

    def lane(self, index: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[index])

    def fork(self) -> None:
        for stream in self._streams:
            stream.wait_stream(self._main)

    def wait(self, lane: int, other: int) -> None:
        if lane != other:
            self._streams[lane].wait_stream(self._streams[other])

    def join(self) -> None:
        for stream in self._streams:
            self._main.wait_stream(stream)

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with capturing(graph, self._main, self._pool):
            result = run()
        return graph.replay, result
