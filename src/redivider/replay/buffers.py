"""Buffers that a run changes, put back for the second run.

Spectral norm, for one, moves its vectors at every forward: a second run must start from the vectors
that the first one found, and must not move them once more. Which buffers a module changes is
learned at its first run, by comparing all of them; from then on only those are copied. Running
statistics have a rule of their own (statistics.py) and do not count here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from redivider.errors import ChangedError, UnitError
from redivider.replay.statistics import counting_layers

Slot: TypeAlias = tuple[int, str]
"""A buffer's place: the index of the module that owns it, and its name there."""

# The slots that a module changes, by its training flags: in evaluation it may change others.
_learned: WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], frozenset[Slot]]]
_learned = WeakKeyDictionary()


class Buffers:
    """What the buffers that a run changes were before it, and the state of all others."""

    def __init__(self, modules: Sequence[nn.Module], flags: tuple[bool, ...]) -> None:
        buffers = _buffers(modules)
        known = _learned.setdefault(modules[0], {}).get(flags)
        self._flags = flags
        self._first = known is None
        self.before = {
            slot: buffers[slot].clone() for slot in (buffers if known is None else known)
        }
        self._rest = {slot: (buffer, buffer._version) for slot, buffer in buffers.items()}

    def finish(self, modules: Sequence[nn.Module]) -> None:
        """After the run: keep the old values of what it changed, and watch the rest."""
        now = _buffers(modules)
        if self._first:
            # By value: batch norm's own operator, for one, writes to its buffers without counting.
            self.before = {
                slot: old
                for slot, old in self.before.items()
                if now[slot] is not self._rest[slot][0] or not torch.equal(old, now[slot])
            }
            _learned[modules[0]][self._flags] = frozenset(self.before)
        for slot in self.before:
            del self._rest[slot]
        for slot, (buffer, version) in self._rest.items():
            if now[slot] is not buffer or (buffer._version != version and not self._first):
                raise UnitError(
                    f"f changed its buffer {slot[1]!r}, which its first forward had left alone, so "
                    "the old value is lost and the forward cannot be run again; change it in every "
                    "forward or outside of f"
                )
            self._rest[slot] = (buffer, buffer._version)

    def replace(self, before: dict[Slot, Tensor]) -> None:
        """Take values that were saved, and trust the others to be what they were."""
        self.before, self._rest = before, {}

    @contextmanager
    def again(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Put copies of the old values in place, which the second run may change."""
        now = _buffers(modules)
        for slot, (buffer, version) in self._rest.items():
            if now.get(slot) is not buffer or buffer._version != version:
                raise ChangedError(
                    f"the buffer {slot[1]!r} of f was changed between the forward and the "
                    "backward, which runs f again and needs it as it was"
                )
        for (index, name), value in self.before.items():
            modules[index]._buffers[name] = value.clone()
        try:
            yield
        finally:
            for index, name in self.before:
                modules[index]._buffers[name] = now[index, name]


def _buffers(modules: Sequence[nn.Module]) -> dict[Slot, Tensor]:
    counting = counting_layers(modules)
    return {
        (index, name): buffer
        for index, module in enumerate(modules)
        if module._buffers and module not in counting
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
