"""Buffers that a run changes, put back for the second run.

Spectral norm, for one, moves its vectors at every forward: a second run must start from the vectors
that the first one found, and must not move them once more. Which buffers a module changes is
learned at its first run, by comparing all of them; from then on only those are copied. Running
statistics of torch's layers have a rule of their own (statistics.py) and do not count here.
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
"""A buffer's place: the index of the module that owns it, and its name there."""

Case: TypeAlias = tuple[tuple[bool, ...], tuple[Slot, ...]]
"""The training flags, since in evaluation others may change, and all slots: f may be rebuilt."""

# The slots that a module changes.
_learned: WeakKeyDictionary[nn.Module, dict[Case, frozenset[Slot]]]
_learned = WeakKeyDictionary()


class Buffers:
    """What the buffers that a run changes were before it, and the state of all others."""

    def __init__(self, modules: Sequence[nn.Module], flags: tuple[bool, ...]) -> None:
        buffers = _buffers(modules)
        self._case = flags, tuple(buffers)
        known = _learned.setdefault(modules[0], {}).get(self._case)
        self._first = known is None
        self.before = {
            slot: buffers[slot].clone() for slot in (buffers if known is None else known)
        }
        self._rest = {slot: (buffer, buffer._version) for slot, buffer in buffers.items()}

    def finish(self, modules: Sequence[nn.Module]) -> None:
        """After the run: keep the old values of what it changed, and watch the rest."""
        now = _buffers(modules)
        if self._first:
            # By value too: batch norm's own operator, for one, writes without counting.
            self.before = {
                slot: old
                for slot, old in self.before.items()
                if _is_written(*self._rest[slot]) or not _same(old, now.get(slot))
            }
            _learned[modules[0]][self._case] = frozenset(self.before)
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
        """Take values that were saved, and trust the others to be what they were."""
        self.before, self._rest = before, {}

    def again(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Put the old values in place: copies of what the second run may change."""
        return self._in_place(modules) if self.before or self._rest else nullcontext()

    @contextmanager
    def _in_place(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        now = _buffers(modules)
        for slot, (buffer, version) in self._rest.items():
            if _is_written(buffer, version):
                raise ChangedError(
                    f"the buffer {slot[1]!r} of f was changed between the forward and the "
                    "backward, which runs f again and needs it as it was"
                )
        old = {slot: value.clone() for slot, value in self.before.items()}
        # One that was replaced by another tensor is still there as it was.
        old |= {slot: each for slot, (each, _) in self._rest.items() if now.get(slot) is not each}
        holders = {slot: modules[slot[0]]._buffers for slot in old}
        for slot, value in old.items():
            holders[slot][slot[1]] = value
        try:
            yield
        finally:
            for slot, holder in holders.items():
                holder[slot[1]] = now.get(slot)


def changes_buffers(module: nn.Module) -> bool:
    """Whether a module that has run changes buffers, beside running statistics."""
    return any(_learned.get(module, {}).values())


def leaves_buffers_alone(module: nn.Module) -> bool:
    """Whether a module is known to; one that has not run is not."""
    return bool(_learned.get(module)) and not changes_buffers(module)


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
