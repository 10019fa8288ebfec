"""Random numbers of a run, drawn again by a second run.

A run draws from the generators of the CPU and of its device. `Draws` uses the caller's generators,
which end as if the module had run once. It keeps the state of those that the first run used: 16
bytes on a GPU (a seed and an offset), 5,056 on the CPU, whose Mersenne twister cannot be moved to
an offset. In a pipeline numbers come from a seed instead (seeded.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Randomness(ABC):
    """Source of the random numbers of a run."""

    @abstractmethod
    def first(self) -> AbstractContextManager[None]:
        """Surround the first run."""

    @abstractmethod
    def again(self) -> AbstractContextManager[None]:
        """Surround a later run: it draws the same numbers, and generators end as they were."""


class Draws(Randomness):
    """The caller's generators, with their states from before the run."""

    def __init__(self, device: torch.device) -> None:
        self._devices = devices_of(device)
        self._before: dict[torch.device, Tensor] = {}

    @contextmanager
    def first(self) -> Iterator[None]:
        before = {device: get_state(device) for device in self._devices}
        yield
        self._before = {
            device: state
            for device, state in before.items()
            if not torch.equal(state, get_state(device))
        }

    def again(self) -> AbstractContextManager[None]:
        return self._replaying() if self._before else nullcontext()

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        with restoring_states(self._before):
            for device, state in self._before.items():
                set_state(device, state)
            yield


def devices_of(device: torch.device) -> tuple[torch.device, ...]:
    """Return the devices whose generators a run on a device may use."""
    return (CPU,) if device.type in ("cpu", "meta") else (CPU, device)


@contextmanager
def restoring_states(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of generators afterwards."""
    states = {device: get_state(device) for device in devices}
    try:
        yield
    finally:
        for device, state in states.items():
            set_state(device, state)


def get_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
