"""What is wrong with data, in one line that says what to do."""

from importlib import import_module
from typing import Any


class DataError(ValueError):
    """Data are missing, damaged, or asked for in a way that cannot be."""


def reason(error: BaseException) -> str:
    """An error of somebody else's in one line, to be quoted in ours."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(module: str, package: str) -> Any:
    """Import what only some data need; the core has torch alone."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(
            f'this needs {package}, which is not installed; pip install "redivider[train]"'
        ) from None
