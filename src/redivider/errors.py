"""Errors that say which unit they come from, and which package is missing."""

from importlib import import_module
from types import TracebackType
from typing import Any


class UnitError(ValueError):
    """A unit does what it must not, or is given what it cannot take."""


class CaptureError(RuntimeError):
    """A step that cannot be captured, or a captured one that cannot be run so."""


class PipelineError(RuntimeError):
    """A pipeline over several processes cannot go on; the message names the rank that failed."""

    is_first = False
    """Whether no other process has said so before."""
    is_told = False
    """Whether it has been reported to the other processes."""


class ChangedError(RuntimeError):
    """Something that the backward needs was changed since the forward."""


class naming:
    """Put the unit's name before our own errors, and beside everyone else's.

    Entered twice for every unit of a step: as a generator it would take longer. What the unit was
    `given` is told beside errors about the kind of it.
    """

    def __init__(self, unit: str, given: str = "") -> None:
        self._unit, self._given = unit, given

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, UnitError | ChangedError):
            raise type(error)(f"{self._unit}: {error}") from error.__cause__
        if isinstance(error, Exception):
            is_of_kind = isinstance(error, TypeError | AttributeError)
            error.add_note(f"in {self._unit}" + (self._given if is_of_kind else ""))


def require(module: str, purpose: str, extra: str = "train") -> Any:
    """Import an optional dependency, or raise an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # the package is there, and broken: its own error says more
        raise ImportError(missing(module, purpose, extra), name=module) from None


def missing(module: str, purpose: str, extra: str = "train") -> str:
    """Return the line that says which package to install, and how."""
    top = module.partition(".")[0]
    package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(top, top)
    return f'{purpose} needs {package}; pip install "redivider[{extra}]"'
