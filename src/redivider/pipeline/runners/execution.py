"""Execution of a pipeline's ticks: eagerly, or by graphs while the pipeline is steady.

It is independent of the transport of messages (transport.py).
"""

from abc import ABC, abstractmethod
from typing import Any

from redivider.pipeline.tick import Tick


class Execution(ABC):
    """Choice of how ticks run."""

    is_active = False
    """Whether the last tick ran by a graph, and what is in flight lies in graph memory."""

    @abstractmethod
    def step(self, x: Any, target: Any, side: dict[str, Any]) -> Tick | None:
        """Feed a micro-batch and run a tick by a graph; return None if it must run eagerly."""

    @abstractmethod
    def leave(self) -> None:
        """Copy everything in flight from graph memory to where eager ticks read it."""

    @abstractmethod
    def withdraw(self) -> None:
        """Forget the last step, whose micro-batch was refused."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all graphs, as when a state is loaded."""


class Eager(Execution):
    """Execution without graphs."""

    def step(self, x: Any, target: Any, side: dict[str, Any]) -> Tick | None:
        return None

    def leave(self) -> None:
        pass

    def withdraw(self) -> None:
        pass

    def forget(self) -> None:
        pass
