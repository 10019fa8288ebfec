"""Errors that a user can fix; each is one line and contains the remedy."""

import os
from importlib.util import find_spec

from redivider.errors import missing


class TrainError(ValueError):
    """Request that cannot be met; the command line prints it without a traceback."""


class SharedError(TrainError):
    """Error that all processes raise, and only rank 0 prints."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints it."""
        return os.environ.get("RANK", "0") == "0"


def first_mismatch(error: RuntimeError) -> str:
    """Return the first line of an error of `load_state_dict`, below its title."""
    return "".join(str(error).split("\n")[1:2]).strip() or str(error)


def check_installed(*modules: str) -> None:
    """Raise an ImportError for a missing package now, not hours into a run."""
    for module in modules:
        if find_spec(module) is None:
            raise ImportError(missing(module, "training"), name=module)
