"""Tensors that a caller passes to a pipeline: which are refused, and which must not change yet."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from redivider.errors import ChangedError
from redivider.strides import is_dense
from redivider.tree import tensors_of


def verify_inputs(x: Any, target: Any, side: dict[str, Any]) -> None:
    """Refuse tensors that a pipeline cannot train with."""
    by_role = {"the input": x, "the target": target}
    by_role |= {f"the keyword {name!r}": value for name, value in side.items()}
    for role, value in by_role.items():
        for tensor in tensors_of(value):
            if tensor.requires_grad:
                raise ValueError(
                    f"{role} requires grad, but a pipeline gives it no gradient; detach it, make "
                    "what computes it a unit, or train with a Chain"
                )
            if tensor.is_inference():
                raise ValueError(f"{role} was made in inference mode; give a clone of it")


def verify_mode() -> None:
    """Refuse to train in inference mode, where torch records no gradients."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a pipeline trains, and cannot do so under torch.inference_mode")


class CallerTensors:
    """Caller's tensors in flight, with the versions at which a later tick must find them."""

    def __init__(self) -> None:
        # Weak references suffice: a tensor that the caller has dropped can no longer change. A view
        # may die before its base, so the base is watched as well. A view with gaps is not the one
        # in flight: a dense copy of it is.
        self._inputs: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._targets: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}

    def note(self, microbatch: int, inputs: Any, target: Any) -> None:
        """Note the current versions of a micro-batch's tensors."""
        for noted, value in ((self._inputs, inputs), (self._targets, target)):
            tensors = tensors_of(value)
            tensors += [t._base for t in tensors if t._base is not None and is_dense(t)]
            noted[microbatch] = [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    def drop(self, microbatch: int) -> None:
        """Forget the tensors of a micro-batch that was refused."""
        self._inputs.pop(microbatch, None)
        self._targets.pop(microbatch, None)

    def forget(self) -> None:
        """Forget all tensors: no tick needs them any more."""
        self._inputs.clear()
        self._targets.clear()

    def verify(self, oldest: int, oldest_target: int) -> None:
        """Raise `ChangedError` if a tensor that a tick still needs was changed in place.

        Args:
            oldest: First micro-batch whose inputs are needed.
            oldest_target: First micro-batch whose target is needed.
        """
        for role, noted, first in (
            ("input", self._inputs, oldest),
            ("target", self._targets, oldest_target),
        ):
            for n in [n for n in noted if n < first]:
                del noted[n]
            for n, versions in noted.items():
                if _is_changed(versions):
                    raise ChangedError(
                        f"the {role} of micro-batch {n} was changed in place while it is in "
                        "flight, and is needed as it was; give every step tensors of its own, such "
                        "as a clone of a buffer that is filled again"
                    )


def _is_changed(versions: Iterable[tuple[weakref.ref[Tensor], int]]) -> bool:
    alive = ((reference(), version) for reference, version in versions)
    return any(tensor is not None and tensor._version != version for tensor, version in alive)
