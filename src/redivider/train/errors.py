"""What a user can mend, in one line that says how."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

from redivider.errors import missing


class TrainError(ValueError):
    """Something that was asked for cannot be; the command line shows it without a traceback."""

    is_first = True
    """Whether this process is to say it, of several that have it."""


def need(*modules: str) -> None:
    """Say what is to be installed before hours have passed."""
    for each in modules:
        if find_spec(each) is None:
            raise ImportError(missing(each, "training"), name=each)


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """The nearest name there is, or what else to do."""
    close = get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else otherwise
