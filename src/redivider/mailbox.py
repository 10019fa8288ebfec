"""What a device has to tell the host, read when it has arrived and never waited for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Mailbox:
    """Values under way from a device to the host, each with what to do about it.

    On the CPU a value is read at once. On a GPU it is copied beside the computation and read by a
    later `poll`, so that no step waits for it.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []

    def __reduce__(self) -> Any:  # copies and pickles of a chain start with nothing under way
        return Mailbox, ()

    def post(self, value: Tensor, read: Callable[[Tensor], None]) -> None:
        """Send a value to the host, where `read` gets it."""
        if value.is_meta:  # there is no value
            return
        if value.device.type == "cpu":
            read(value)
            return
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # no host takes part in a replay
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        arrived = torch.get_device_module(value.device).Event()
        arrived.record()
        self._under_way.append((host, arrived, read))

    def poll(self) -> None:
        """Read what has arrived; after an error nothing that was posted behind it counts."""
        if (
            self._under_way
            and torch.cuda.is_available()
            and torch.cuda.is_current_stream_capturing()
        ):
            return  # nothing may be asked of the device meanwhile
        while self._under_way and self._under_way[0][1].query():
            host, _, read = self._under_way.pop(0)
            try:
                read(host)
            except ArithmeticError:
                self._under_way.clear()
                raise
