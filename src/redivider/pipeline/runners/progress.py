"""How far a GPU has come, readable without a CUDA call.

A mark is a count that the GPU writes to pinned memory of the host when it reaches that point. In
contrast to querying an event, reading it cannot block (see pending.py).

    main stream    ... kernels ... mark
    side stream              wait for a transfer, mark
"""

from typing import Any, Protocol

import torch


class Mark(Protocol):
    """Point in the work of a GPU."""

    def has_passed(self) -> bool:
        """Return whether the GPU has reached it."""
        ...


class Count:
    """Counter of a stream's marks, on the GPU and in memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = torch.zeros((), dtype=torch.int64, device=device)
        self.on_host = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self.num_marks = 0

    def mark(self) -> Mark:
        """Mark this point of the current stream."""
        self._on_gpu.add_(1)
        self.on_host.copy_(self._on_gpu, non_blocking=True)
        self.num_marks += 1
        return CountReached(self, self.num_marks)


class CountReached:
    """Mark that has been passed when a counter has reached a number."""

    def __init__(self, count: Count, number: int) -> None:
        self._count, self._number = count, number

    def has_passed(self) -> bool:
        return int(self._count.on_host) >= self._number


class Progress:
    """Marks in the work of a GPU: on its main stream, and behind transfers.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._main, self._side = Count(device), Count(device)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the counters are zeroed there
        self._main.mark()
        torch.cuda.synchronize(device)  # its kernel is loaded now, and not while the GPU waits

    def mark(self) -> Mark:
        """Mark this point of the current stream."""
        return self._main.mark()

    def mark_behind(self, work: Any) -> Mark:
        """Mark the end of a transfer, whose tensors the caller keeps."""
        with torch.cuda.stream(self._stream):
            work.wait()
            return self._side.mark()


class NoProgress:
    """Marks where the host itself waits for transfers: all have been passed."""

    def mark(self) -> Mark:
        return self

    def mark_behind(self, work: Any) -> Mark:
        return self

    def has_passed(self) -> bool:
        return True
