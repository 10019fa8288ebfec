"""Buffers that a run changes, restored for the second run.

Spectral norm, for example, updates its vectors in every forward. A second run must start from the
vectors of the first one, and must not update them again. The first run of a module shows which
buffers it changes, by comparing all of them; from then on only those are copied. Running statistics
of torch's layers follow another rule (statistics.py) and are left out here.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from redivider.errors import ChangedError, UnitError
from redivider.replay.statistics import writing_layers

Slot: TypeAlias = tuple[int, str]
"""Place of a buffer: the index of its module, and its name there."""

Case: TypeAlias = tuple[tuple[bool, ...], tuple[Slot, ...]]
"""Training flags (in evaluation other buffers may change) and all slots (f may be rebuilt)."""

# Slots that a module is known to change.
_changed_slots: WeakKeyDictionary[nn.Module, dict[Case, frozenset[Slot]]]
_changed_slots = WeakKeyDictionary()


class Buffers:
    """Values from before a run of the buffers that it changes, and versions of all others."""

    def __init__(self, modules: Sequence[nn.Module], flags: tuple[bool, ...]) -> None:
        buffers = _buffers(modules)
        self._case = flags, tuple(buffers)
        known = _changed_slots.setdefault(modules[0], {}).get(self._case)
        self._is_first_run = known is None
        self.before = {
            slot: buffers[slot].clone() for slot in (buffers if known is None else known)
        }
        self._rest = {slot: (buffer, buffer._version) for slot, buffer in buffers.items()}

    def finish(self, modules: Sequence[nn.Module]) -> None:
        """Keep the old values of the buffers that the run changed, and the versions of others."""
        now = _buffers(modules)
        if self._is_first_run:
            # By value too: some operators, like batch norm's, write without raising the version.
            self.before = {
                slot: old
                for slot, old in self.before.items()
                if _is_written(*self._rest[slot]) or not _same(old, now.get(slot))
            }
            _changed_slots[modules[0]][self._case] = frozenset(self.before)
        for slot, (buffer, version) in list(self._rest.items()):
            if slot in self.before:
                del self._rest[slot]
            elif _is_written(buffer, version):
                raise UnitError(
                    f"f changed its buffer {slot[1]!r}, which its first forward had left alone, so "
                    "the old value is lost and the forward cannot be run again; change it in every "
                    "forward or outside of f"
                )

    def replace(self, before: dict[Slot, Tensor]) -> None:
        """Use saved values, and assume that all other buffers are unchanged."""
        self.before, self._rest = before, {}

    def again(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Use copies of the old values inside, which the second run may change."""
        return self._substituted(modules) if self.before or self._rest else nullcontext()

    @contextmanager
    def _substituted(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        now = _buffers(modules)
        for slot, (buffer, version) in self._rest.items():
            if _is_written(buffer, version):
                raise ChangedError(
                    f"the buffer {slot[1]!r} of f was changed between the forward and the "
                    "backward, which runs f again and needs it as it was"
                )
        old = {slot: value.clone() for slot, value in self.before.items()}
        # A buffer that was replaced by another tensor still has its old value.
        old |= {
            slot: buffer for slot, (buffer, _) in self._rest.items() if now.get(slot) is not buffer
        }
        holders = {slot: modules[slot[0]]._buffers for slot in old}
        for slot, value in old.items():
            holders[slot][slot[1]] = value
        try:
            yield
        finally:
            for slot, holder in holders.items():
                holder[slot[1]] = now.get(slot)


def know_buffers(module: nn.Module, like: nn.Module) -> None:
    """Take for known of a module which buffers it changes, if it is known of one like it."""
    if like in _changed_slots:
        _changed_slots[module] = dict(_changed_slots[like])


def changes_buffers(module: nn.Module) -> bool:
    """Return whether a module that has run changes buffers other than running statistics."""
    return any(_changed_slots.get(module, {}).values())


def leaves_buffers_alone(module: nn.Module) -> bool:
    """Return whether a module is known to change no buffers; before its first run it is not."""
    return bool(_changed_slots.get(module)) and not changes_buffers(module)


def _is_written(buffer: Tensor, version: int) -> bool:
    return buffer._version != version


def _same(old: Tensor, now: Tensor | None) -> bool:
    if now is None or old.shape != now.shape:
        return False
    return old.device.type == "meta" or torch.equal(old, now)


def _buffers(modules: Sequence[nn.Module]) -> dict[Slot, Tensor]:
    writing = writing_layers(modules)
    return {
        (index, name): buffer
        for index, module in enumerate(modules)
        if module._buffers and module not in writing
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
