"""Values sent from a device to the host, read when they have arrived and never waited for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Mailbox:
    """Values in flight from a device to the host, with the functions that read them.

    On the CPU a value is read at once. On a GPU it is copied beside the computation and read by a
    later `poll`, so that no step waits for it.
    """

    def __init__(self) -> None:
        self._in_flight: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []

    def __reduce__(self) -> Any:  # copies and pickles of a chain start with nothing in flight
        return Mailbox, ()

    def post(self, value: Tensor, read: Callable[[Tensor], None]) -> None:
        """Send a value to the host, where `read` receives it."""
        if value.is_meta:  # it has no value
            return
        if value.device.type == "cpu":
            read(value)
            return
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a replay has no host to read it
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        arrived = torch.get_device_module(value.device).Event()
        arrived.record()
        self._in_flight.append((host, arrived, read))

    def poll(self) -> None:
        """Read what has arrived; an error discards everything posted after it."""
        if (
            self._in_flight
            and torch.cuda.is_available()
            and torch.cuda.is_current_stream_capturing()
        ):
            return  # a capture allows no queries of the device
        while self._in_flight and self._in_flight[0][1].query():
            host, _, read = self._in_flight.pop(0)
            try:
                read(host)
            except ArithmeticError:
                self._in_flight.clear()
                raise
