"""The circumstances of a run, so that a second run gives the same numbers."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, Literal

import torch
from torch import nn

from redivider.replay.autocast import Autocast
from redivider.replay.buffers import Buffers
from redivider.replay.modes import Modes
from redivider.replay.random import Draws, Randomness
from redivider.replay.statistics import statistics_counted, statistics_untouched


class Record:
    """What a run of a module and those within it depends on beside arguments and parameters.

        with Record(list(f.modules()), device).first() as record:
            r = f(a)
        with record.again():
            assert torch.equal(f(a), r)

    The first run leaves everything as running the module once does: random state, running
    statistics, buffers. The second one leaves everything as it found it.

    Args:
        modules: The module that is run, first, and all those within it.
        device: Where it runs.
        randomness: Where its random numbers come from; the caller's generators unless given.
        counts: The run in which running statistics are updated: "first", or "again".
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        randomness: Randomness | None = None,
        counts: Literal["first", "again"] = "first",
    ) -> None:
        self._modules = modules
        self.autocast = Autocast(device)
        self._modes = Modes(modules)
        self._buffers = Buffers(modules, self._modes.flags)
        self._randomness = randomness or Draws(device)
        self._counts = counts

    @contextmanager
    def first(self) -> Iterator["Record"]:
        """Surround the first run."""
        with self._counting("first"), self._randomness.first():
            yield self
        self._buffers.finish(self._modules)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround a later run."""
        modules = self._modules
        with (
            self._modes.again(modules),
            self._buffers.again(modules),
            self._counting("again"),
            self.autocast.again(),
            self._randomness.again(),
        ):
            yield

    def by(self, randomness: Randomness) -> "Record":
        """The same circumstances, but for the random numbers."""
        record = copy(self)
        record._randomness = randomness
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a run in flight has recorded, for a checkpoint."""
        return {
            "modes": self._modes.flags,
            "autocast": self.autocast.settings,
            "buffers": self._buffers.before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the place of a record that was saved."""
        self._modes.flags = tuple(state["modes"])
        self.autocast.settings = state["autocast"]
        self._buffers.replace(state["buffers"])

    def _counting(self, run: str) -> AbstractContextManager[None]:
        count = statistics_counted if run == self._counts else statistics_untouched
        return count(self._modules)
