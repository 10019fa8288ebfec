"""Record of a run's settings and state, so that a second run gives the same numbers."""

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
    """Settings and state that a run depends on, besides arguments and parameters.

        with Record(list(f.modules()), device).first() as record:
            r = f(a)
        with record.again():
            assert torch.equal(f(a), r)

    The first run changes random state, running statistics and buffers as a plain run does. The
    second one changes nothing.

    Args:
        modules: The module, followed by all modules inside it.
        device: Device of the run.
        randomness: Source of random numbers; by default the caller's generators.
        counts: The run that updates running statistics: "first" or "again".
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
        """Return a copy of this record with another source of random numbers."""
        record = copy(self)
        record._randomness = randomness
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return the record of a run in flight, for a checkpoint."""
        return {
            "modes": self._modes.flags,
            "autocast": self.autocast.settings,
            "buffers": self._buffers.before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved record."""
        self._modes.flags = tuple(state["modes"])
        self.autocast.settings = state["autocast"]
        self._buffers.replace(state["buffers"])

    def _counting(self, run: str) -> AbstractContextManager[None]:
        count = statistics_counted if run == self._counts else statistics_untouched
        return count(self._modules)
