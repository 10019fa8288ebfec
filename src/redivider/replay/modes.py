"""Training flags, restored for a second run."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn


class Modes:
    """The `training` flags of modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.flags = tuple(module.training for module in modules)

    def again(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Set these flags inside, and restore the current ones afterwards."""
        now = Modes(modules)
        return nullcontext() if now.flags == self.flags else self._replacing(now, modules)

    @contextmanager
    def _replacing(self, now: "Modes", modules: Sequence[nn.Module]) -> Iterator[None]:
        self._apply(modules)
        try:
            yield
        finally:
            now._apply(modules)

    def _apply(self, modules: Sequence[nn.Module]) -> None:
        for module, flag in zip(modules, self.flags, strict=True):
            module.training = flag
