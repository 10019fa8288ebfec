"""Batches one after another: made several at once, each equal to the one made alone."""

import weakref
from collections import deque
from itertools import islice

import pytest
import torch
from support.images import equal, make_images
from torch.utils._python_dispatch import TorchDispatchMode

from redivider.data import Text
from redivider.data import batches as module
from redivider.data.vocabulary import Bytes


def text_batches(size, **options):
    tokens = (torch.arange(700) * 31 + 7) % 256
    return Text("made", tokens, Bytes()).batches(size, context=16, **options)


SOURCES = {
    "images": make_images().batches,
    "channels last": lambda *a, **o: make_images().batches(*a, channels_last=True, **o),
    "text": text_batches,
    "masked text": lambda *a, **o: text_batches(*a, masked=0.3, **o),
}
source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


class Operations(TorchDispatchMode):
    """Mode that counts operations other than views."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@source
@pytest.mark.parametrize("together", [1, 1000, 40_000, 2**21])
def test_they_are_those_of_each_step(make, together, monkeypatch):
    monkeypatch.setitem(module.TOGETHER, "cpu", together)
    for train, starts in ((True, (0, 1, 17)), (False, (0, 1))):
        alone, visited = (make(3, train=train, seed=4) for _ in range(2))
        num = 3 * len(alone) if train else len(alone)
        for start in starts:
            steps = list(islice(visited.since(start), num - start))
            assert len(steps) == num - start
            for step, batch in enumerate(steps, start):
                true = alone[step]
                assert equal(batch, true)
                assert [t.stride() for t in batch] == [t.stride() for t in true]
                assert [t.dtype for t in batch] == [t.dtype for t in true]


@source
def test_they_take_fewer_operations(make, monkeypatch):
    monkeypatch.setitem(module.TOGETHER, "cpu", module.TOGETHER["cuda"])
    alone, visited = (make(2, train=True) for _ in range(2))
    alone[0], visited[0]  # draw the epoch
    with Operations() as by_step:
        for step in range(16):
            alone[step]
    with Operations() as together:
        list(islice(visited.since(0), 16))
    assert together.num < by_step.num / 2


@source
def test_a_batch_keeps_no_other(make, monkeypatch):
    monkeypatch.setitem(module.TOGETHER, "cpu", module.TOGETHER["cuda"])
    for batch in islice(make(2, train=True).since(0), 9):
        for tensor in batch:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("together", [1, 2**21])
def test_a_batch_is_not_kept_when_it_is_given_away(together, monkeypatch):
    monkeypatch.setitem(module.TOGETHER, "cpu", together)
    visits = make_images().batches(2, train=True).since(0)
    for _ in range(5):
        x, y = next(visits)
        kept = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [ref() for ref in kept] == [None, None]


def test_those_made_together_are_gone_before_there_are_more(monkeypatch):
    batches = make_images().batches(2, train=True)
    take = batches._take
    last: list[weakref.ref[torch.Tensor]] = []

    def taken(span):
        assert [ref() for ref in last] == [None] * len(last)
        x, y = take(span)
        last[:] = weakref.ref(x), weakref.ref(y)
        return x, y

    monkeypatch.setattr(batches, "_take", taken)
    monkeypatch.setitem(module.TOGETHER, "cpu", 5 * 2 * 3 * 32 * 32)
    deque(islice(batches.since(0), 30), maxlen=0)  # keeps none of them
    assert last


def test_no_more_are_made_at_once_than_memory_is_meant_for(monkeypatch):
    batches = make_images().batches(2, train=True)
    take = batches._take
    spans: list[tuple[int, int, int]] = []

    def taken(span):
        spans.append(span)
        return take(span)

    monkeypatch.setattr(batches, "_take", taken)
    monkeypatch.setitem(module.TOGETHER, "cpu", 5 * 2 * 3 * 32 * 32)
    next(batches.since(0))
    assert spans == [(0, 0, 2)]  # the first is there as soon as it can be
    spans.clear()
    list(islice(batches.since(0), 30))
    assert [(epoch, stop - start) for epoch, start, stop in spans] == [
        *((0, 2), (0, 10), (0, 10), (0, 10), (0, 10), (0, 8)),
        *((1, 10),),
    ]
    monkeypatch.setitem(module.TOGETHER, "cpu", 100)
    spans.clear()
    list(islice(batches.since(0), 3))
    assert [stop - start for _, start, stop in spans] == [2, 2, 2]
