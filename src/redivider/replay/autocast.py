"""Autocast settings: a second run casts where the first one did, and nowhere else."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from redivider.replay.switch import switched_off


class Autocast:
    """Autocast settings around a run, for its device and the CPU.

    Args:
        device: Device of the run.
        settings: Settings of an earlier time; the current ones by default.
    """

    def __init__(
        self, device: torch.device, settings: dict[str, tuple[bool, torch.dtype]] | None = None
    ) -> None:
        self._kind = device.type
        self.settings = settings or {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
            if torch.amp.is_autocast_available(kind)
        }

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype that autocast uses on the device, or None if it is off."""
        enabled, dtype = self.settings.get(self._kind, (False, None))
        return dtype if enabled else None

    def again(self) -> AbstractContextManager[Any]:
        """Enter the same settings, without a cache: see `uncached_casts`."""
        contexts = [
            torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
            for kind, (enabled, dtype) in self.settings.items()
            if enabled or torch.is_autocast_enabled(kind)
        ]
        if len(contexts) < 2:
            return contexts[0] if contexts else nullcontext()
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context)
        return stack


def uncached_casts() -> AbstractContextManager[None]:
    """Keep casts of weights out of autocast's cache.

    Every run works on new stand-ins of the weights. Their casts are never used again, and the
    cache would keep them until the caller's autocast region ends, perhaps after many steps.
    """
    return switched_off(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Turn autocast off inside, whatever the caller's settings.

    The cache is turned off too, although it is not in use: the compiler makes another graph if it
    is on.
    """
    before = Autocast(device).settings
    try:
        for kind in before:
            torch.set_autocast_enabled(kind, False)
        with uncached_casts():
            yield
    finally:
        for kind, (enabled, _) in before.items():
            torch.set_autocast_enabled(kind, enabled)


def is_autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast is on for a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
