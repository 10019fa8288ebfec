"""Lanes that only keep a record, and a detector of races between them, without a GPU."""

from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redivider.backward.overlap import MAIN, SIDE, Lanes, Overlap


class Recorded(Lanes):
    """Writes down who was given what, and what each of it comes after."""

    def __init__(self):
        self.lane = MAIN
        self.known = [frozenset(), frozenset()]  # what a lane has behind it
        self.after = {}  # by name: what it comes after
        self.where = {}

    @contextmanager
    def on(self, lane):
        before, self.lane = self.lane, lane
        yield
        self.lane = before

    def mark(self, lane):
        return self.known[lane]

    def wait(self, lane, event):
        self.known[lane] |= event

    def note(self, name):
        self.after[name] = self.known[self.lane]
        self.known[self.lane] |= {name}
        self.where[name] = self.lane


class Memory:
    """One piece of memory: the lane that it was taken for, who wrote it, and who uses it."""

    def __init__(self, storage, home, writer):
        self.alive = StorageWeakRef(storage)
        self.home = home
        self.writers, self.users = {writer}, {writer}


class Races(TorchDispatchMode):
    """Watches every operation as if each lane ran whenever it may, and writes races down.

    What an operation reads must have been written before, as far as its lane knows; and memory that
    was let go is taken again by its own lane at once, as CUDA's allocator does, so all its users
    must be behind that lane by then.
    """

    def __init__(self, lanes):
        super().__init__()
        lanes.known = [each | {"before"} for each in lanes.known]
        self.lanes, self.found, self.num = lanes, [], 0
        self._memory, self._free = {}, {MAIN: [], SIDE: []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        lane, name = self.lanes.lane, f"{self.num}:{func}"
        self.num += 1
        self._collect()
        known = self.lanes.known[lane]
        used = [self._of(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)]
        written = [each for each in used if func._schema.is_mutable]
        for each in used:
            if not each.writers <= known:
                self.found.append(f"{name} on lane {lane} reads before {each.writers - known}")
        for each in written:
            if not each.users <= known:
                self.found.append(f"{name} on lane {lane} writes before {each.users - known}")
        result = func(*args, **kwargs or {})
        self.lanes.note(name)
        for each in used:
            each.users.add(name)
        for each in written:
            each.writers.add(name)
        for each in tree_leaves(result):
            if _is_tensor(each) and each.untyped_storage()._cdata not in self._memory:
                self._take(lane, name, known)
                self._of(each, name)
        return result

    def _of(self, tensor, writer="before"):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = Memory(storage, self.lanes.lane, writer)
        return self._memory[storage._cdata]

    def _collect(self):
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                self._free[memory.home].append(memory)
                del self._memory[key]

    def _take(self, lane, name, known):
        for memory in self._free[lane]:
            if not memory.users <= known:
                late = memory.users - known
                self.found.append(f"{name} on lane {lane} takes memory that {late} still use")
        self._free[lane] = [each for each in self._free[lane] if not each.users <= known]


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


class OnTheCpu(Overlap):
    """The engine with lanes that record."""

    lanes: Recorded

    def _make_lanes(self):
        type(self).lanes = Recorded()
        return type(self).lanes
