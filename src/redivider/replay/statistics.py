"""Running statistics of normalisation layers, counted once.

In training such a layer normalises by the statistics of the batch and, beside that, updates its
running ones. A second run on the same batch must do the first without the second.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# These pass no running statistics on when the flag is off; what a subclass does is its own affair.
HEED_THE_FLAG = {layer.forward for layer in BATCH_NORMS}


def counting_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The normalisation layers that would update their running statistics if they ran now."""
    return [
        layer
        for layer in modules
        if isinstance(layer, BATCH_NORMS + INSTANCE_NORMS)
        and layer.training
        and layer._buffers.get("running_mean") is not None
    ]


@contextmanager
def statistics_untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Normalise by the batch, and leave the running statistics as they are."""
    layers = counting_layers(modules)
    flags = [(each, each.track_running_stats) for each in layers if _heeds(each)]
    real = [(each, dict(each._buffers)) for each in layers if not _heeds(each)]
    for layer, _ in flags:
        layer.track_running_stats = False  # type: ignore[assignment]
    for layer, buffers in real:  # these get copies to spend
        layer._buffers.update({k: v if v is None else v.clone() for k, v in buffers.items()})
    try:
        yield
    finally:
        for layer, flag in flags:
            layer.track_running_stats = flag
        for layer, buffers in real:
            layer._buffers.update(buffers)


def _heeds(layer: nn.Module) -> bool:
    return type(layer).forward in HEED_THE_FLAG
