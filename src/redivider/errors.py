"""Errors that say which unit they come from."""

from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def naming(unit: str) -> Iterator[None]:
    """Put the unit's name before our own errors, and beside everyone else's."""
    try:
        yield
    except (UnitError, ChangedError) as error:
        raise type(error)(f"{unit}: {error}") from error.__cause__
    except Exception as error:
        error.add_note(f"in {unit}")
        raise
