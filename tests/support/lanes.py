"""Lanes that only keep a record, and a detector of races between them, without a GPU."""

from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redivider.backward.overlap import MAIN, SIDE, Lanes, Overlap


class Recorded(Lanes):
    """Lanes that record where every operation ran, and what it was ordered after."""

    def __init__(self):
        self.lane = MAIN
        # By lane: the operations that precede its next one.
        self.known: list[frozenset[str]] = [frozenset(), frozenset()]
        self.after = {}  # by name of an operation: those that precede it
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
    """One storage: the lane that allocated it, and the operations that wrote and used it."""

    def __init__(self, storage, home, writer):
        self.alive = StorageWeakRef(storage)
        self.home = home
        self.writers, self.users = {writer}, {writer}


class Races(TorchDispatchMode):
    """Detector of races between lanes that run as early as their events allow.

    An operation may read only what its lane knows to be written. Memory that was freed is reused
    by its own lane at once, as CUDA's allocator does, so that lane must know all its users to be
    done by then.
    """

    def __init__(self, lanes):
        super().__init__()
        lanes.known = [known | {"before"} for known in lanes.known]
        self.lanes, self.num = lanes, 0
        self.found: list[str] = []  # messages
        self._memory: dict[int, Memory] = {}
        self._free: dict[int, list[Memory]] = {MAIN: [], SIDE: []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        lane, name = self.lanes.lane, f"{self.num}:{func}"
        self.num += 1
        self._collect()
        known = self.lanes.known[lane]
        used = [self._of(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        written = [self._of(leaf) for leaf in _written(func._schema, args, kwargs or {})]
        for memory in used:
            if not memory.writers <= known:
                self.found.append(f"{name} on lane {lane} reads before {memory.writers - known}")
        for memory in written:
            if not memory.users <= known:
                self.found.append(f"{name} on lane {lane} writes before {memory.users - known}")
        result = func(*args, **kwargs or {})
        self.lanes.note(name)
        for memory in used:
            memory.users.add(name)
        for memory in written:
            memory.writers.add(name)
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage()._cdata not in self._memory:
                self._take(lane, name, known)
                self._of(leaf, name)
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
        self._free[lane] = [m for m in self._free[lane] if not m.users <= known]


def _written(schema, args, kwargs):
    """Return the tensors among the arguments that an operation changes."""
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    values |= kwargs
    changed = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return [leaf for name in changed for leaf in tree_leaves(values.get(name)) if _is_tensor(leaf)]


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


class OnTheCpu(Overlap):
    """Overlap with lanes that record."""

    lanes: Recorded

    def _make_lanes(self):
        type(self).lanes = Recorded()
        return type(self).lanes
