"""Stacks of what is under way, such as runs inside of each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def pushed(stack: list[Any], item: Any) -> Iterator[Any]:
    """Push an item to a stack inside, and pop it afterwards."""
    stack.append(item)
    try:
        yield item
    finally:
        stack.pop()
