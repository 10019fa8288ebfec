"""Global switches of torch, turned off temporarily."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def switched_off(is_on: Callable[[], bool], switch: Callable[[bool], object]) -> Iterator[None]:
    """Turn a switch off inside, and restore it afterwards."""
    before = is_on()
    switch(False)
    try:
        yield
    finally:
        switch(before)
