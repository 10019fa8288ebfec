"""Errors that name the unit they come from, or the package that is missing."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import TracebackType
from typing import Any


class UnitError(ValueError):
    """Error of a unit that does what it must not, or receives what it cannot take."""


class CaptureError(RuntimeError):
    """Error of a step that cannot be captured, or of a captured step that cannot be replayed."""


class PipelineError(RuntimeError):
    """Failure of a pipeline over several processes; the message names the rank that failed."""

    def __init__(self, message: str, *, is_first: bool = False) -> None:
        super().__init__(message)
        self.is_first = is_first
        """True if no other process has reported it before."""


class StateError(ValueError):
    """A state is damaged, not ours, or does not fit; nothing was changed."""


class Agreed(Exception):
    """Exception that all processes raise alike: none of them has failed."""


class ChangedError(RuntimeError):
    """Error of a backward whose weights, arguments or buffers changed after the forward."""


class naming:
    """Context manager that puts a unit's name into errors.

    Our own errors begin with the name; all others get it as a note. It is a class because every
    unit of a step enters it twice, and a generator would take longer.

    Args:
        unit: Index and name of the unit.
        hint: Text for the note of a TypeError or AttributeError, which may come from the input.
    """

    def __init__(self, unit: str, hint: str = "") -> None:
        self._unit, self._hint = unit, hint

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
            may_be_input = isinstance(error, TypeError | AttributeError)
            error.add_note(f"in {self._unit}" + (self._hint if may_be_input else ""))


def require(module: str, purpose: str, extra: str = "train") -> Any:
    """Import an optional dependency, or raise an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # the package is installed but broken: its own error says more
        raise ImportError(missing(module, purpose, extra), name=module) from None


def missing(module: str, purpose: str, extra: str = "train") -> str:
    """Return the line that says which package to install, and how."""
    top = module.partition(".")[0]
    package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(top, top)
    return f'{purpose} needs {package}; pip install "redivider[{extra}]"'


def writes_error() -> UnitError:
    """Return the error for an f that changes its input or parameters in place."""
    return UnitError(
        "f writes into its own input or parameters, which others still need; leave out "
        "inplace=True where f begins"
    )


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a question with the closest known name, or `otherwise` if none is close."""
    names = list(known)
    close = get_close_matches(name, names, 1)
    if not close and len(name) > 1:  # most names contain a single letter by chance
        close = [longer for longer in names if name in longer]
    return f"did you mean {close[0]!r}?" if close else otherwise


def no_such(kind: str, name: object, known: Iterable[str], otherwise: str) -> str:
    """Return the text of an error about a name in lower case that is not known."""
    return f"there is no {kind} {name!r}; {did_you_mean(str(name).lower(), known, otherwise)}"


def not_one_of(name: str, value: object, known: Iterable[str], *, also: str = "") -> str:
    """Return the text of an error about an argument that must be one of some names."""
    names = list(known)
    hint = did_you_mean(str(value), names)
    must = f"{name} must be one of {', '.join(map(repr, names))}{also}, got {value!r}"
    return f"{must}; {hint}" if hint else must
