"""The circumstances of a run, so that a second run gives the same numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from redivider.replay.autocast import Autocast
from redivider.replay.buffers import Buffers
from redivider.replay.modes import Modes
from redivider.replay.random import Draws
from redivider.replay.statistics import statistics_untouched


class Record:
    """What a run of a module and those within it depends on beside arguments and parameters.

        with Record(list(f.modules()), device).first() as record:
            r = f(a)
        with record.again():
            assert torch.equal(f(a), r)

    The first run leaves everything as running the module once does: random state, running
    statistics, buffers. The second one leaves everything as it found it.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._autocast = Autocast(device)
        self._modes = Modes(modules)
        self._buffers = Buffers(modules, self._modes.flags)
        self._draws = Draws(device)

    @contextmanager
    def first(self) -> Iterator["Record"]:
        """Surround the first run."""
        yield self
        self._draws.finish()
        self._buffers.finish(self._modules)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround a later run."""
        modules = self._modules
        with (
            self._modes.again(modules),
            self._buffers.again(modules),
            statistics_untouched(modules),
            self._autocast.again(),
            self._draws.again(),
        ):
            yield
