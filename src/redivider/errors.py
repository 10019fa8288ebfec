"""Errors that say which unit they come from."""

from types import TracebackType


class UnitError(ValueError):
    """A unit does what it must not, or is given what it cannot take."""


class CaptureError(RuntimeError):
    """A step that cannot be captured, or a captured one that cannot be run so."""


class PipelineError(RuntimeError):
    """A pipeline over several processes cannot go on; the message names the rank that failed."""

    is_first = False
    """Whether no other process has said so before."""


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
