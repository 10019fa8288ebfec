"""Training and evaluation flags as they were."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn


class Modes:
    """The `training` flags of some modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.flags = tuple(each.training for each in modules)

    def again(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Set the flags, then put them back."""
        now = Modes(modules)
        return nullcontext() if now.flags == self.flags else self._instead_of(now, modules)

    @contextmanager
    def _instead_of(self, now: "Modes", modules: Sequence[nn.Module]) -> Iterator[None]:
        self._apply(modules)
        try:
            yield
        finally:
            now._apply(modules)

    def _apply(self, modules: Sequence[nn.Module]) -> None:
        for each, flag in zip(modules, self.flags, strict=True):
            each.training = flag
