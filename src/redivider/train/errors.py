"""Errors that a user can fix; each is one line and contains the remedy."""

from importlib.util import find_spec

from redivider.errors import missing


class TrainError(ValueError):
    """Request that cannot be met; the command line prints it without a traceback."""

    is_first = True
    """False where another process prints the same error."""


def check_installed(*modules: str) -> None:
    """Raise an ImportError for a missing package now, not hours into a run."""
    for module in modules:
        if find_spec(module) is None:
            raise ImportError(missing(module, "training"), name=module)
