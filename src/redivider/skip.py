"""Warning of a skip inside of f, where a whole residual block was made a coupling.

A coupling adds f(a) to the other stream, which is its skip. An f(a) = a + g(a) has a second one:
that is another network than was meant, and its streams grow from unit to unit.
"""

import warnings
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

# Functions of couplings that have not run with a graph yet.
_unchecked: WeakSet[nn.Module] = WeakSet()


class SkipWarning(UserWarning):
    """Warning that f of a coupling adds its own input to its result."""


def expect_no_skip(f: nn.Module) -> None:
    """Let the first run of f that has a graph be checked."""
    _unchecked.add(f)


def warn_of_skip(f: nn.Module, output: Any, a: Tensor) -> None:
    """Warn, once, if the output of a run of f has a skip from its input `a`."""
    has_graph = isinstance(output, Tensor) and output.requires_grad and a.requires_grad
    if has_graph and f in _unchecked:
        from redivider.skip_path import has_skip

        _unchecked.discard(f)
        if has_skip(output, a):
            warnings.warn(describe_skip(f), SkipWarning, stacklevel=2)


def describe_skip(f: nn.Module) -> str:
    """Return a sentence that says what is wrong with f, and what to do."""
    return (
        f"f, {type(f).__name__}, adds its own input to its result, as a whole residual block does; "
        "the other stream is the skip already, so give Coupling the branch alone, what the block "
        "adds to x; blocks that are to stay as they are can be units themselves, without Coupling"
    )
