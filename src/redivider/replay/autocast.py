"""Autocast as it was: a second run casts where the first one did, and nowhere else."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from redivider.replay.switch import switched_off


class Autocast:
    """The autocast settings around a run, for its device and the CPU.

    Args:
        device: Where it runs.
        settings: Those of another time, instead of now.
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
        """To what it casts on the device, if it does."""
        enabled, dtype = self.settings.get(self._kind, (False, None))
        return dtype if enabled else None

    def again(self) -> AbstractContextManager[Any]:
        """Enter the same settings, without a cache: see `uncached_casts`."""
        found = [
            torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
            for kind, (enabled, dtype) in self.settings.items()
            if enabled or torch.is_autocast_enabled(kind)
        ]
        if len(found) < 2:
            return found[0] if found else nullcontext()
        stack = ExitStack()
        for each in found:
            stack.enter_context(each)
        return stack


def uncached_casts() -> AbstractContextManager[None]:
    """Keep the casts of weights made here out of autocast's cache.

    A run works on stand-ins of the weights, new ones each time: nobody would ask for their casts
    again, and the caller's region, which may last for many steps, would collect them.
    """
    return switched_off(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Cast nothing here, whatever the caller does.

    The cache, which is not in use, is off too: a compiler would make another graph where it is on.
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
    """Whether autocast is on for a device; not every kind of device has one."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
