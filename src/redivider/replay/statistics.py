"""Running statistics of normalisation layers, counted once.

In training such a layer normalises by the statistics of the batch and, beside that, updates its
running ones. A second run on the same batch must do the first without the second.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from redivider.replay.copies import buffers_to_spend

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = BATCH_NORMS + INSTANCE_NORMS
# In training these write running statistics and do not read them. A subclass with a forward of its
# own may read them, as batch renormalisation does: there they are buffers like all others.
WRITE_ONLY = {layer.forward for layer in NORMS}
# These pass no running statistics on when the flag is off.
HEED_THE_FLAG = {layer.forward for layer in BATCH_NORMS}


def counting_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The normalisation layers that would update their running statistics if they ran now."""
    return [
        layer
        for layer in modules
        if "running_mean" in layer._buffers  # which rules out most, at once
        and layer.training
        and isinstance(layer, NORMS)
        and layer.running_mean is not None
    ]


def writing_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of them whose result does not depend on their running statistics."""
    return [each for each in counting_layers(modules) if type(each).forward in WRITE_ONLY]


def statistics_untouched(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Normalise by the batch, and leave the running statistics as they are."""
    layers = writing_layers(modules)
    return _untouched(layers) if layers else nullcontext()


@contextmanager
def _untouched(layers: Sequence[nn.Module]) -> Iterator[None]:
    flags = [(each, each.track_running_stats) for each in layers if _heeds(each)]
    for layer, _ in flags:
        layer.track_running_stats = False  # type: ignore[assignment]
    try:
        with buffers_to_spend([each for each in layers if not _heeds(each)]):
            yield
    finally:
        for layer, flag in flags:
            layer.track_running_stats = flag


def statistics_counted(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Update the running statistics, and count the batch in all layers at once.

    Each layer would launch a kernel to add one to its own counter.
    """
    layers = writing_layers(modules)
    return _counted(layers) if layers else nullcontext()


@contextmanager
def _counted(counting: Sequence[nn.Module]) -> Iterator[None]:
    layers = [
        (each, each._buffers["num_batches_tracked"])
        for each in counting
        # With no momentum it averages over all batches, and needs their number while it runs.
        if _heeds(each)
        and each.track_running_stats
        and each.momentum is not None
        and not isinstance(each, nn.SyncBatchNorm)  # which insists on its own
    ]
    counters = [(layer, counter) for layer, counter in layers if counter is not None]
    for layer, _ in counters:
        layer._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for layer, counter in counters:
            layer._buffers["num_batches_tracked"] = counter
    found = [counter for _, counter in counters]
    if _counted_later:
        _counted_later[-1].extend(found)
    elif found:
        torch._foreach_add_(found, 1)


_counted_later: list[list[Tensor]] = []


@contextmanager
def counted_later() -> Iterator[list[Tensor]]:
    """Collect the counters of batches that would be counted within; the caller adds one to them."""
    _counted_later.append([])
    try:
        yield _counted_later[-1]
    finally:
        _counted_later.pop()


def _heeds(layer: nn.Module) -> bool:
    return type(layer).forward in HEED_THE_FLAG
