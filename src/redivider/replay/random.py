"""The random numbers of a run, drawn again by a second run.

A run draws from the CPU's generator and from its device's. There are two ways to have the same
numbers twice. `Draws` lets the first run draw from the caller's generators, which end as if it had
run once, and keeps their state before it, where it did draw: 16 bytes on a GPU (a seed and an
offset), 5,056 on the CPU, whose Mersenne twister cannot be moved to an offset. `Seeded` gives every
run the numbers of a seed, and keeps nothing else.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Randomness(ABC):
    """Where the random numbers of a run come from."""

    @abstractmethod
    def first(self) -> AbstractContextManager[None]:
        """Surround the first run."""

    @abstractmethod
    def again(self) -> AbstractContextManager[None]:
        """Surround a later run: the same numbers, and generators that end where they were."""


class Draws(Randomness):
    """The caller's generators, and their states before the run."""

    def __init__(self, device: torch.device) -> None:
        self._devices = _devices(device)
        self._before: dict[torch.device, Tensor] = {}

    @contextmanager
    def first(self) -> Iterator[None]:
        before = {device: _get_state(device) for device in self._devices}
        yield
        self._before = {
            device: state
            for device, state in before.items()
            if not torch.equal(state, _get_state(device))
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        with _kept_states(self._before):
            for device, state in self._before.items():
                _set_state(device, state)
            yield


class Seeded(Randomness):
    """Numbers that are a function of a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._devices = _devices(device)

    def first(self) -> AbstractContextManager[None]:
        return self.again()

    @contextmanager
    def again(self) -> Iterator[None]:
        with _kept_states(self._devices):
            for device in self._devices:
                _set_seed(device, self._seed)
            yield


def mix_seeds(*parts: int | str) -> int:
    """One seed out of several numbers or names; the same on every machine."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # generators take 63 bits


def _devices(device: torch.device) -> tuple[torch.device, ...]:
    return (CPU,) if device.type in ("cpu", "meta") else (CPU, device)


@contextmanager
def _kept_states(devices: Iterable[torch.device]) -> Iterator[None]:
    now = {device: _get_state(device) for device in devices}
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


def _set_seed(device: torch.device, seed: int) -> None:
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)
