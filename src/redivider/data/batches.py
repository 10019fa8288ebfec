"""Batches by step, with random access, so that a run can resume at any step."""

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
"""Input elements to build at once, by device, but at least one batch; 2^21 floats are 8 MiB."""


class Span(NamedTuple):
    """Positions of a batch in the order of an epoch, from `start` to `stop`."""

    epoch: int
    start: int
    stop: int


class Batches(ABC):
    """Batches of a source: `x, y = batches[step]`, a pure function of the seed and the step.

        batches = load("digits", train=True).batches(64, train=True, seed=0)
        x, y = batches[1000]                  # an epoch has len(batches) steps
        for x, y in batches.since(1000): ...  # endless in training

    In training every epoch is shuffled anew, and the last samples are dropped where they do not
    fill a batch. In evaluation there is one epoch, in order, and its last batch may be smaller.
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
                "choose a smaller batch"
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self.train, self.seed = train, operator.index(seed)
        self.device = torch.empty(0, device=device).device  # resolves the index of "cuda"

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        if self.train:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        return self._take(self.span(step))

    def __iter__(self) -> Iterator[Batch]:
        if self.train:  # a second loop would silently repeat the first epoch
            raise TypeError("training has no end: use batches.since(step) or batches[step]")
        return self.since(0)

    def since(self, step: int) -> Iterator[Batch]:
        """Iterate over batches from this step on: endless in training."""
        step = operator.index(step)
        steps = count(step) if self.train else range(step, len(self))
        return self._iterate(map(self.span, steps))

    def span(self, step: int) -> Span:
        """Return the epoch of a step and its positions there."""
        step = operator.index(step)
        if step < 0 or (step >= len(self) and not self.train):
            raise IndexError(f"there is no step {step}; an epoch has {len(self)}")
        epoch, step_in_epoch = divmod(step, len(self))
        start = step_in_epoch * self.batch_size
        return Span(epoch, start, min(start + self.batch_size, self.num_samples))

    @abstractmethod
    def _take(self, span: Span) -> Batch:
        """Build one batch, in this process."""

    def _iterate(self, spans: Iterable[Span]) -> Iterator[Batch]:
        """Yield the batches of the spans, built ahead of time where that is faster.

        Here several are built at once on a GPU, where the launch of a kernel takes as long for a
        small batch as for a large one. On a CPU small batches stay in the cache.
        """
        max_elements, num = TOGETHER.get(self.device.type, 1), 1
        for epoch, spans_of_epoch in groupby(spans, key=lambda span: span.epoch):
            while group := list(islice(spans_of_epoch, num)):
                first = group[0].start
                # In a list, so that `pop` leaves no reference to a batch here.
                built = [self._take(Span(epoch, first, group[-1].stop))]
                if len(group) == 1:
                    num = max(1, max_elements // (built[0][0][0].numel() * self.batch_size))
                    yield built.pop()
                    continue
                x, y = built.pop()
                for span in group:
                    positions = slice(span.start - first, span.stop - first)
                    # Clones: a view would keep the memory of the whole group alive.
                    yield x[positions].clone(), y[positions].clone()
                del x, y  # free the group before the next one is built
