"""Running statistics of normalisation layers, counted once.

In training such a layer normalises by the statistics of the batch and also updates its running
ones. A second run on the same batch must normalise without the update.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from redivider.replay.copies import buffers_to_spend
from redivider.replay.stack import pushed

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = BATCH_NORMS + INSTANCE_NORMS
# In training these write running statistics and do not read them. A subclass with its own forward
# may read them, as batch renormalisation does: then they are treated like other buffers.
WRITE_ONLY = {layer.forward for layer in NORMS}
# These leave running statistics alone if `track_running_stats` is False.
HEED_TRACKING_FLAG = {layer.forward for layer in BATCH_NORMS}


def counting_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the normalisation layers that would update running statistics if they ran now."""
    return [
        layer
        for layer in modules
        if "running_mean" in layer._buffers  # a cheap test that rules out most modules
        and layer.training
        and isinstance(layer, NORMS)
        and layer.running_mean is not None
    ]


def writing_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of the counting layers whose result does not depend on running statistics."""
    return [layer for layer in counting_layers(modules) if type(layer).forward in WRITE_ONLY]


def statistics_untouched(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Leave running statistics unchanged inside."""
    layers = writing_layers(modules)
    return _untouched(layers) if layers else nullcontext()


@contextmanager
def _untouched(layers: Sequence[nn.Module]) -> Iterator[None]:
    flags = [(layer, layer.track_running_stats) for layer in layers if _heeds_flag(layer)]
    for layer, _ in flags:
        layer.track_running_stats = False  # type: ignore[assignment]
    try:
        with buffers_to_spend([layer for layer in layers if not _heeds_flag(layer)]):
            yield
    finally:
        for layer, flag in flags:
            layer.track_running_stats = flag


def statistics_counted(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Update running statistics, and count the batch for all layers at once.

    Otherwise every layer would launch a kernel to add one to its own counter.
    """
    layers = writing_layers(modules)
    return _counted(layers) if layers else nullcontext()


@contextmanager
def _counted(counting: Sequence[nn.Module]) -> Iterator[None]:
    layers = [
        (layer, layer._buffers["num_batches_tracked"])
        for layer in counting
        # Without momentum it averages over all batches, and needs their number while it runs.
        if _heeds_flag(layer)
        and layer.track_running_stats
        and layer.momentum is not None
        and not isinstance(layer, nn.SyncBatchNorm)  # requires a counter of its own
    ]
    counted = [(layer, counter) for layer, counter in layers if counter is not None]
    for layer, _ in counted:
        layer._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for layer, counter in counted:
            layer._buffers["num_batches_tracked"] = counter
    counters = [counter for _, counter in counted]
    if _counted_later:
        _counted_later[-1].extend(counters)
    elif counters:
        torch._foreach_add_(counters, 1)


_counted_later: list[list[Tensor]] = []


def counted_later() -> AbstractContextManager[list[Tensor]]:
    """Collect the batch counters of the layers that run inside; the caller adds one to them."""
    return pushed(_counted_later, [])


def _heeds_flag(layer: nn.Module) -> bool:
    return type(layer).forward in HEED_TRACKING_FLAG
