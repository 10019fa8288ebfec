"""Switches of torch's that are off for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def switched_off(is_on: Callable[[], bool], switch: Callable[[bool], object]) -> Iterator[None]:
    """Turn something off, and afterwards to what it was."""
    before = is_on()
    switch(False)
    try:
        yield
    finally:
        switch(before)
