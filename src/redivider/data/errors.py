"""What is wrong with data, in one line that says what to do."""

from typing import Any

import redivider.errors


class DataError(ValueError):
    """Data are missing, damaged, or asked for in a way that cannot be."""


def reason(error: BaseException) -> str:
    """An error of somebody else's in one line, to be quoted in ours."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(module: str, purpose: str) -> Any:
    """Import a package that only some data need; the core needs torch alone."""
    try:
        return redivider.errors.require(module, purpose)
    except ImportError as error:
        raise DataError(reason(error)) from None
