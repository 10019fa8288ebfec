"""Graphs without a GPU: operations are recorded, and replayed on the same memory."""

import random
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redivider.pipeline.runners.cuda_graphs import Graphs

MAIN = -1


class Tape(Graphs):
    """Replays lanes interleaved at random, each in its own order."""

    def __init__(self, num_lanes, seed=0):
        self.current = MAIN
        self.random = random.Random(seed)
        self.num_replays = 0
        self.preferred: list[set[int]] = []
        self.segments: list[list[tuple[int, Any]]] = []  # of the part that is recorded

    @contextmanager
    def lane(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def prefer(self, lanes):
        self.preferred.append(set(lanes))

    def fork(self):
        if not self.segments:
            self.segments.append([])
        self.segments.append([])

    def wait(self, lane, other):
        if lane != other:
            done = sum(owner == other for owner, _ in self.segments[-1])
            self.segments[-1].append((lane, (other, done)))

    def join(self):
        self.segments.append([])

    def cut(self):
        segments, self.segments = self.segments, []
        if not segments:
            return None

        def replay():
            self.num_replays += 1
            for segment in segments:
                for operation in self._interleaved(segment):
                    operation()

        return replay

    def record(self, run):
        with _Writing(self) as writing:
            result = run()
        writing.undo()
        return result

    def _interleaved(self, segment):
        lanes: dict[int, list[Any]] = {}
        for lane, operation in segment:
            lanes.setdefault(lane, []).append(operation)
        done = dict.fromkeys(lanes, 0)
        while lanes:
            lane = self.random.choice(list(lanes))
            if done[lane] == len(lanes[lane]):
                del lanes[lane]
                continue
            operation = lanes[lane][done[lane]]
            if isinstance(operation, tuple):  # a wait
                other, number = operation
                if done.get(other, 0) < number:
                    continue
            else:
                yield operation
            done[lane] += 1


class _Writing(TorchDispatchMode):
    def __init__(self, tape):
        super().__init__()
        self.tape, self.own, self.before = tape, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a number while a graph is captured")
        traits = _traits(func)
        inputs = _tensors((args, kwargs))
        if traits.writes:
            self._save(inputs)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in storages:
                self.own[tensor.untyped_storage()._cdata] = tensor  # which keeps its memory
        if traits.computes:

            def again():
                with torch.no_grad():
                    result = func(*args, **kwargs)
                    if not traits.is_mutable:
                        for old, new in zip(outputs, _tensors(result), strict=True):
                            old.detach().copy_(new)

            assert self.tape.segments, f"{func} runs between two parts"
            self.tape.segments[-1].append((self.tape.current, again))
        return result

    def _save(self, tensors):
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self.own and key not in self.before:
                self.before[key] = (tensor.detach(), tensor.detach().clone())

    def undo(self):
        """Restore the memory: a GPU does not run what it records, and here it ran."""
        for tensor, before in self.before.values():
            tensor.copy_(before)


class _Traits(NamedTuple):
    """Traits of an operation."""

    is_mutable: bool
    writes: bool
    computes: bool


@cache
def _traits(func) -> _Traits:
    schema = func._schema
    is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    # Batch norm writes to its running statistics, and its schema does not say so.
    writes = schema.is_mutable or "batch_norm" in func.__name__
    return _Traits(schema.is_mutable, writes, not is_view and "empty" not in func.__name__)


def _tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for branch in tree for tensor in _tensors(branch)]
