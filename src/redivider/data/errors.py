"""Errors about data, in one line that contains the remedy."""

from typing import Any

import redivider.errors


class DataError(ValueError):
    """Missing or damaged data, or invalid options for them."""


def reason(error: BaseException) -> str:
    """Return the message of another library's error in one line, to quote it in ours."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(module: str, purpose: str) -> Any:
    """Import a package that only some data need, or raise a `DataError` that names it."""
    try:
        return redivider.errors.require(module, purpose)
    except ImportError as error:
        raise DataError(reason(error)) from None
