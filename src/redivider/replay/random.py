"""The random numbers of a run, drawn again by a second run.

A run draws from the CPU's generator and from its device's, and the caller's generators must end as
if it had run once. So the first run draws from them directly, and what is kept is their state
before it, where it did draw: 16 bytes on a GPU (a seed and an offset), 5,056 on the CPU, whose
Mersenne twister cannot be moved to an offset.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Draws:
    """The generators' states before a run; after `finish`, of those that it drew from."""

    def __init__(self, device: torch.device) -> None:
        devices = (CPU,) if device.type in ("cpu", "meta") else (CPU, device)
        self._before = {each: _get_state(each) for each in devices}

    def finish(self) -> None:
        """Forget the generators that the run left alone."""
        self._before = {
            device: state
            for device, state in self._before.items()
            if not torch.equal(state, _get_state(device))
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers, then put the generators back where they were."""
        now = {device: _get_state(device) for device in self._before}
        for device, state in self._before.items():
            _set_state(device, state)
        try:
            yield
        finally:
            for device, state in now.items():
                _set_state(device, state)


def _get_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
