"""Crop, flip and normalisation of whole batches, on whatever device they are."""

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(
    images: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, padding: int
) -> Tensor:
    """Pad with zeros, cut the old size out again at (top, left), and mirror where `flip` is true.

    Args:
        images: (N, C, H, W), of any dtype.
        top: First row of each image's cut, from 0 to 2 * padding.
        left: First column of it.
        flip: Whether to mirror it.
        padding: Rows and columns of zeros around an image.
    """
    num, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4).flatten(2)
    across = torch.arange(width, device=images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], across.flip(0), across)
    # One gather for all three; every channel of an image reads the same places.
    places = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
    places = places.view(num, 1, height * width).expand(num, channels, height * width)
    return padded.gather(2, places).view_as(images)


class Normalise:
    """Bytes to floats: (x / 255 - mean) / std by channel."""

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        centre, spread = torch.tensor([mean, std], dtype=torch.float64).view(2, 1, -1, 1, 1)
        self._scale = (1 / (255 * spread)).to(device, torch.float32)
        self._shift = (centre / spread).to(device, torch.float32)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._dtype = dtype

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise a batch; computed in float32 whatever the dtype of the result."""
        wide = images.float().mul_(self._scale).sub_(self._shift)
        return wide.to(self._dtype, memory_format=self._format)
