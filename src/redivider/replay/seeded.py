"""Random numbers that are a function of a seed, of a micro-batch and of a unit.

Nothing is kept between two runs of a unit, and a captured step draws them by offsets alone.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from redivider.replay.random import (
    CPU,
    Randomness,
    devices_of,
    get_state,
    restoring_states,
    set_state,
)
from redivider.replay.stack import pushed


class Seeded(Randomness):
    """Numbers that are a function of a seed, a micro-batch and a unit.

    The generator of the CPU gets a seed made of all three. That of a GPU gets the seed and an
    offset: during the capture of a CUDA graph only the offset can be set, relative to the start of
    the replay.
    """

    def __init__(self, seed: int, microbatch: int, unit: int, device: torch.device) -> None:
        self._seed, self._microbatch, self._unit = seed, microbatch, unit
        self._devices = devices_of(device)
        self.drew = False
        """True once a run has drawn numbers."""

    def first(self) -> AbstractContextManager[None]:
        return self.again()

    @contextmanager
    def again(self) -> Iterator[None]:
        if _captures and len(self._devices) > 1:
            with self._captured(*_captures[-1], self._devices[1]):
                yield
            return
        with restoring_states(self._devices):
            for device in self._devices:
                if device.type == "cpu":
                    mixed = mix_seeds(self._seed, self._microbatch, self._unit)
                    torch.default_generator.manual_seed(mixed)
                else:
                    _place(device, self._seed, _offset(self._microbatch, self._unit))
            start = [get_state(device) for device in self._devices]
            yield
            pairs = zip(self._devices, start, strict=True)
            self.drew = any(not torch.equal(get_state(device), state) for device, state in pairs)

    @contextmanager
    def _captured(
        self, begins: int, draws: list[torch.device], device: torch.device
    ) -> Iterator[None]:
        before = get_state(device)
        _set_offset(device, _offset(self._microbatch, self._unit) - _offset(begins, 0))
        start = get_state(device)
        yield
        if torch.equal(get_state(device), start):
            set_state(device, before)  # the replay of a graph that draws nothing is cheaper
        else:
            self.drew = True
            draws.append(device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator inside, and restore its state afterwards."""
    with restoring_states((CPU,)):
        torch.default_generator.manual_seed(seed)
        yield


# The first micro-batch of the tick that is being captured, and the devices on which it draws.
_captures: list[tuple[int, list[torch.device]]] = []


@contextmanager
def captured_from(microbatch: int) -> Iterator[list[torch.device]]:
    """Count offsets from a micro-batch inside, as `replayed_from` will do.

    Yields a list, which is filled with the devices that draw numbers.
    """
    draws: list[torch.device] = []
    with pushed(_captures, (microbatch, draws)):
        yield draws


@contextmanager
def replayed_from(microbatch: int, seed: int, device: torch.device | None) -> Iterator[None]:
    """Replay a graph with the numbers of a micro-batch and later ones, if it draws any."""
    if device is None:
        yield
        return
    with restoring_states((device,)):
        _place(device, seed, _offset(microbatch, 0))
        yield


def mix_seeds(*parts: int | str) -> int:
    """Return one seed from several numbers or names, the same on every machine."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # generators take 63 bits


def _offset(microbatch: int, unit: int) -> int:
    """Return the offset of a unit's numbers: far apart, and a multiple of 4, as CUDA requires."""
    return (microbatch * 2**12 + unit) * 2**20


def _place(device: torch.device, seed: int, offset: int) -> None:
    generator = _generator(device)
    generator.manual_seed(seed)
    generator.set_offset(offset)


def _set_offset(device: torch.device, offset: int) -> None:
    """Set an offset during a capture, when `Generator.set_offset` is refused."""
    seed = get_state(device)[:8]
    offset_bytes = torch.tensor([offset], dtype=torch.int64).view(torch.uint8)
    set_state(device, torch.cat([seed, offset_bytes]))


def _generator(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
