"""Capturing a CUDA graph, also one that fails."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Iterator[None]:
    """Capture what is done within, on a CUDA stream and those that wait for it.

    If that fails, the end of the capture fails as well; what is raised is what came first. Other
    threads may go on: a loader's may ask for pinned memory.
    """
    generator = torch.cuda.default_generators[stream.device.index]
    fresh = generator.clone_state()
    first: BaseException | None = None
    collects = gc.isenabled()
    gc.disable()  # a graph that is let go of in the meantime would end the capture
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        # The old state would wait for the capture's end for ever.
        generator.graphsafe_set_state(fresh)
        if first is not None and error is not first:
            raise first from first.__cause__
        raise
    finally:
        if collects:
            gc.enable()
