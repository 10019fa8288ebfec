"""Capture of a CUDA graph, with clean-up if it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from redivider.gpu.garbage import uncollected


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Iterator[None]:
    """Capture the work of a `with` block, on a CUDA stream and those that wait for it.

    If the block fails, the end of the capture fails as well; the first error is raised. Other
    threads may use CUDA meanwhile: that of a loader may allocate pinned memory.
    """
    generator = torch.cuda.default_generators[stream.device.index]
    state = generator.clone_state()
    first: BaseException | None = None
    capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
    try:
        with uncollected(), capture:  # to free another graph would end the capture
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        # The old state would wait forever for the end of the capture.
        generator.graphsafe_set_state(state)
        if first is not None and error is not first:
            raise first from first.__cause__
        raise
