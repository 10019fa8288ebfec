"""What a caller has given to a pipeline: needed while it is in flight, and not to be written."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from redivider.errors import ChangedError
from redivider.pipeline.stages.layout import is_dense
from redivider.tree import tensors_of


def verify_given(x: Any, target: Any, side: dict[str, Any]) -> None:
    """Refuse what cannot be trained by."""
    named = {"the input": x, "the target": target}
    named |= {f"the keyword {name!r}": value for name, value in side.items()}
    for what, value in named.items():
        for each in tensors_of(value):
            if each.requires_grad:
                raise ValueError(
                    f"{what} requires grad, but a pipeline gives it no gradient; detach it, make "
                    "what computes it a unit, or train with a Chain"
                )
            if each.is_inference():
                raise ValueError(f"{what} was made in inference mode; give a clone of it")


def verify_mode() -> None:
    """Refuse to train where torch lets nobody."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a pipeline trains, and cannot do so under torch.inference_mode")


class Given:
    """The caller's tensors in flight, which a tick yet to come will read."""

    def __init__(self) -> None:
        # Nobody but the caller can change them, so they are not held for that. What they are views
        # of may outlive them; where there are gaps, a copy is in flight.
        self._inputs: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._targets: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}

    def note(self, microbatch: int, inputs: Any, target: Any) -> None:
        """Remember what they are like now."""
        for noted, value in ((self._inputs, inputs), (self._targets, target)):
            found = tensors_of(value)
            found += [e._base for e in found if e._base is not None and is_dense(e)]
            noted[microbatch] = [(weakref.ref(e), e._version) for e in found]

    def forget(self) -> None:
        """None of them is needed any more."""
        self._inputs.clear()
        self._targets.clear()

    def verify(self, oldest: int, oldest_target: int) -> None:
        """Refuse to go on with what was changed.

        Args:
            oldest: The first micro-batch of which inputs are needed.
            oldest_target: The first of which the target is.
        """
        for what, noted, first in (
            ("input", self._inputs, oldest),
            ("target", self._targets, oldest_target),
        ):
            for n in [n for n in noted if n < first]:
                del noted[n]
            for n, tensors in noted.items():
                if _is_changed(tensors):
                    raise ChangedError(
                        f"the {what} of micro-batch {n} was changed in place while it is in "
                        "flight, and is needed as it was; give every step tensors of its own, such "
                        "as a clone of a buffer that is filled again"
                    )


def _is_changed(tensors: Iterable[tuple[weakref.ref[Tensor], int]]) -> bool:
    found = ((each(), version) for each, version in tensors)
    return any(each is not None and each._version != version for each, version in found)
