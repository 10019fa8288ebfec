"""Batches by step: any of them at any time, so that a run can go on where it stopped."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count, groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor

from redivider.data.errors import DataError

Batch = tuple[Tensor, Tensor]
TOGETHER = {"cpu": 1, "cuda": 2**21}
"""Numbers in the inputs that are made at once: 8 MiB of float32, but one batch at least."""


class Span(NamedTuple):
    """Where a batch lies: positions `start` to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


class Batches(ABC):
    """Batches of a source: `x, y = batches[step]`, a pure function of the seed and the step.

        batches = load("digits", train=True).batches(64, train=True, seed=0)
        x, y = batches[1000]                  # epochs follow each other: len(batches) steps in each
        for x, y in batches.since(1000): ...  # without end in training

    In training each epoch has an order of its own, and the last samples are left out where they do
    not fill a batch. In evaluation there is one epoch, in order, and its last batch may be smaller.
    """

    def __init__(
        self,
        source: str,
        num_samples: int,
        batch_size: int,
        *,
        train: bool,
        seed: int,
        device: torch.device | str,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise DataError(f"batch_size must be a whole number, 1 or more, got {batch_size!r}")
        if num_samples < (batch_size if train else 1):
            raise DataError(
                f"{source} has {num_samples} samples, too few for a batch of {batch_size}; "
                "take a smaller batch"
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self.train, self.seed = train, operator.index(seed)
        self.device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", or another

    def __len__(self) -> int:
        """Steps in an epoch."""
        if self.train:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        return self._take(self.span(step))

    def __iter__(self) -> Iterator[Batch]:
        if self.train:  # going through it once more would show the same epoch once more
            raise TypeError("training has no end: use batches.since(step) or batches[step]")
        return self.since(0)

    def since(self, step: int) -> Iterator[Batch]:
        """This step's batch and those that follow: in training without end."""
        step = operator.index(step)
        steps = count(step) if self.train else range(step, len(self))
        return self._visit(map(self.span, steps))

    def span(self, step: int) -> Span:
        """The epoch of a step, and its positions there."""
        step = operator.index(step)
        if step < 0 or (step >= len(self) and not self.train):
            raise IndexError(f"there is no step {step}; an epoch has {len(self)}")
        epoch, place = divmod(step, len(self))
        start = place * self.batch_size
        return Span(epoch, start, min(start + self.batch_size, self.num_samples))

    @abstractmethod
    def _take(self, span: Span) -> Batch:
        """Make one batch, here and now."""

    def _visit(self, spans: Iterable[Span]) -> Iterator[Batch]:
        """Make batches one after another, ahead of time where that helps.

        Here several of them at once on a GPU, where to begin an operation takes as long for a small
        batch as for a large one; on a CPU caches like the small ones.
        """
        most, num = TOGETHER.get(self.device.type, 1), 1
        for epoch, same in groupby(spans, key=lambda span: span.epoch):
            while together := list(islice(same, num)):
                first = together[0].start
                made = [self._take(Span(epoch, first, together[-1].stop))]
                if len(together) == 1:
                    num = max(1, most // (made[0][0][0].numel() * self.batch_size))
                    yield made.pop()  # and do not keep it here
                    continue
                x, y = made.pop()
                for span in together:
                    here = slice(span.start - first, span.stop - first)
                    # Copies: who keeps a batch shall not keep its neighbours.
                    yield x[here].clone(), y[here].clone()
                del x, y  # before there are more
