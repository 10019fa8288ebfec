"""Weights in the precision of autocast, cast once per update instead of at every use.

Autocast casts a weight whenever a product or a convolution uses it. In a pipeline that is twice a
tick, in the forward and in the recovery, and the gradient is cast back as well. A unit that runs
with the cast copy computes the same numbers without these casts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from redivider._torch_private import TorchDispatchMode
from redivider.tree import tensors_of


class Casts:
    """Low-precision copies of weights.

    Args:
        weights: Weights that autocast casts at every use.
        dtype: Dtype of the copies.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.copies = {weight: torch.empty_like(weight, dtype=dtype) for weight in weights}
        self._versions: list[int] = []
        refresh([self])

    def substitute(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights, with copies in place of those that have one."""
        self.refresh_if_stale()
        return [self.copies.get(weight, weight) for weight in weights]

    def mark_fresh(self) -> None:
        """Record that the copies match the current weights."""
        self._versions = [weight._version for weight in self.copies]

    def invalidate(self) -> None:
        """Force a cast before the next use, even if no weight seems to have changed."""
        self._versions = [-1]

    def refresh_if_stale(self) -> None:
        """Cast again if weights were changed outside of an update, e.g. by the caller."""
        # Autograd's counter of in-place changes shows it, without a comparison of numbers.
        if self._versions != [weight._version for weight in self.copies]:
            refresh([self])


@torch.no_grad()
def refresh(casts: Sequence[Casts]) -> None:
    """Cast all weights once, after an update."""
    # A weight that two units share has two copies.
    pairs = [(copy, weight) for cast in casts for weight, copy in cast.copies.items()]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [weight for _, weight in pairs])
    for cast in casts:
        cast.mark_fresh()


@contextmanager
def watching(weights: Sequence[Tensor], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Watch an uncompiled run for casts to `dtype`.

    Yields:
        A list, filled on exit with the weights that were cast once and not used otherwise.
    """
    always_cast: list[Tensor] = []
    with torch.compiler.set_stance("force_eager"), _CastWatch(weights, dtype) as watch:
        yield always_cast
    always_cast += [weight for weight in weights if watch.only_casts(weight)]


class _CastWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records which weights are cast, and which are used uncast."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A run works on stand-ins that share the weights' memory, so storages are compared.
        self._storages = [_storage(weight) for weight in weights]
        self._dtype = dtype
        self._cast: list[int] = []
        self._used: set[int] = set()

    def only_casts(self, weight: Tensor) -> bool:
        """Return whether a weight was cast exactly once, and not used otherwise.

        False for a weight that shares its memory with another one, and for one that is cast several
        times: there autograd sums the gradients in full precision, and a copy would not.
        """
        storage = _storage(weight)
        is_unshared = self._storages.count(storage) == 1
        return is_unshared and self._cast.count(storage) == 1 and storage not in self._used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self._dtype
        if func is not torch.ops.aten.detach.default:
            tensors = tensors_of((args, kwargs))
            if is_cast:
                self._cast += map(_storage, tensors)
            else:
                self._used.update(map(_storage, tensors))
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage
