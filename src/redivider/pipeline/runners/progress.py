"""Progress of a GPU, readable without a CUDA call.

A mark is a count that the GPU writes to pinned memory of the host when it reaches that point. In
contrast to querying an event, reading it cannot block (see pending.py).

    main stream    ... kernels ... mark
    side stream              wait for a transfer, mark
"""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """Point in the work of a GPU."""

    def has_passed(self) -> bool:
        """Return whether the GPU has reached it."""
        ...


class Count:
    """Counter of a stream's marks, in memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_host = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._on_gpu = torch.zeros((), dtype=torch.int64, device=device)
        self._address, self._index = self.on_host.data_ptr(), self._on_gpu.device.index
        self._write = find_stream_write()
        self._num_marks = 0
        if self._mark_and_read(device) != 1:
            self._write = None  # the driver knows the call, and does not allow it
            self._mark_and_read(device)

    def mark(self, stream: int | None = None) -> "CountReached":
        """Mark this point of the current stream, whose handle a caller may know."""
        self._num_marks += 1
        if not self._is_written_by_driver(stream):
            self._on_gpu.fill_(self._num_marks)
            self.on_host.copy_(self._on_gpu, non_blocking=True)
        return CountReached(self, self._num_marks)

    def _is_written_by_driver(self, stream: int | None) -> bool:
        """Let the driver write the count, which is cheaper than a kernel and a copy."""
        if self._write is None:
            return False
        if stream is None:
            stream = torch.cuda.current_stream(self._index).cuda_stream
        return self._write(stream, self._address, self._num_marks, 0) == 0

    def _mark_and_read(self, device: torch.device) -> int:
        """Return the count after a mark. Kernels are loaded now, and not while the GPU waits."""
        self.mark()
        torch.cuda.synchronize(device)
        return int(self.on_host)


def find_stream_write() -> Callable[[int, int, int, int], int] | None:
    """Return the driver's function that writes a number when a stream reaches it, if any."""
    try:
        write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
    except (OSError, AttributeError):  # ROCm, an old driver
        return None
    write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    return write


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
        self._handle: int = self._stream.cuda_stream

    def mark(self) -> Mark:
        """Mark this point of the current stream."""
        return self._main.mark()

    def mark_behind(self, work: Any) -> Mark:
        """Mark the end of a transfer, whose tensors the caller keeps."""
        before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)  # `torch.cuda.stream` takes several times as long
        try:
            work.wait()
            return self._side.mark(self._handle)
        finally:
            torch.cuda.set_stream(before)


class NoProgress:
    """Marks where the host itself waits for transfers: all have been passed."""

    def mark(self) -> Mark:
        return self

    def mark_behind(self, work: Any) -> Mark:
        return self

    def has_passed(self) -> bool:
        return True
