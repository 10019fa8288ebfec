"""Weights in the precision of autocast: cast once per update, and not at every use.

Autocast casts a weight whenever a product or a convolution asks for it: in a pipeline twice a tick,
forward and recovery, and the gradient back once more. A unit that is given the cast weight instead
computes the same numbers without that.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Casts:
    """Copies of weights in fewer bits.

    Args:
        weights: Those that autocast casts at every use.
        dtype: To what.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.copies = {each: torch.empty_like(each, dtype=dtype) for each in weights}
        self._versions: list[int] = []
        refresh([self])

    def standing_in(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The same weights, with copies in place of those that have one."""
        self.follow()
        return [self.copies.get(each, each) for each in weights]

    def note_fresh(self) -> None:
        """Note that the copies are those of the weights as they are."""
        self._versions = [each._version for each in self.copies]

    def distrust(self) -> None:
        """Cast again before the next use, whatever the weights are."""
        self._versions = [-1]

    def follow(self) -> None:
        """Cast again what somebody else has changed since the last update."""
        if self._versions != [each._version for each in self.copies]:
            refresh([self])


@torch.no_grad()
def refresh(casts: Sequence[Casts]) -> None:
    """After an update, cast all weights once."""
    # A weight that two units share has two copies.
    pairs = [(copy, each) for some in casts for each, copy in some.copies.items()]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [each for _, each in pairs])
    for each in casts:
        each.note_fresh()


@contextmanager
def watching(weights: Sequence[Tensor], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Watch a run, uncompiled; what is given is filled with the weights that are always cast."""
    found: list[Tensor] = []
    with torch.compiler.set_stance("force_eager"), _Watch(weights, dtype) as watch:
        yield found
    found += [each for each in weights if watch.casts(each)]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes who is cast, and who is used as it is."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A run works on stand-ins that share the weights' memory.
        self._memory = [_memory(each) for each in weights]
        self._dtype = dtype
        self._cast: list[int] = []
        self._used: set[int] = set()

    def casts(self, weight: Tensor) -> bool:
        """Whether a weight was cast once, and not used otherwise.

        One that shares its memory is left alone, and one that is cast several times: autograd adds
        up its gradients in full precision.
        """
        memory = _memory(weight)
        alone = self._memory.count(memory) == 1
        return alone and self._cast.count(memory) == 1 and memory not in self._used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self._dtype
        if func is not torch.ops.aten.detach.default:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            if is_cast:
                self._cast += map(_memory, tensors)
            else:
                self._used.update(map(_memory, tensors))
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage
