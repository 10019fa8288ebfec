"""Stacks of what is under way, such as runs inside of each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def pushed(stack: list[Item], item: Item) -> Iterator[Item]:
    """Push an item to a stack inside, and pop it afterwards."""
    stack.append(item)
    try:
        yield item
    finally:
        stack.pop()
