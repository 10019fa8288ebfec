"""Running statistics of normalisation layers, counted once.

In training such a layer normalises by the statistics of the batch and, beside that, updates its
running ones. A second run on the same batch must do the first without the second.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def counting_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The normalisation layers that would update their running statistics if they ran now."""
    return [
        layer
        for layer in modules
        if isinstance(layer, BATCH_NORMS + INSTANCE_NORMS)
        and layer.training
        and layer.track_running_stats
    ]


@contextmanager
def statistics_untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Normalise by the batch, and leave the running statistics as they are."""
    layers = counting_layers(modules)
    taken: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    for layer in layers:
        if isinstance(layer, BATCH_NORMS):
            layer.track_running_stats = False
        else:  # instance norm updates its buffers whatever the flag says, so take them away
            taken.append((layer, dict(layer._buffers)))
            layer._buffers.update(dict.fromkeys(layer._buffers))
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True  # type: ignore[assignment]
        for layer, buffers in taken:
            layer._buffers.update(buffers)
