"""Crop, flip and normalisation of whole batches, on any device."""

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(
    images: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, padding: int
) -> Tensor:
    """Pad with zeros, crop to the old size at (top, left), and mirror where `flip` is true.

    Args:
        images: Batch of shape (N, C, H, W), of any dtype.
        top: First row of the crop of each image, from 0 to 2 * padding.
        left: First column of the crop of each image.
        flip: Whether to mirror each image.
        padding: Number of rows and columns of zeros around an image.
    """
    num, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4).flatten(2)
    offsets = torch.arange(width, device=images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], offsets.flip(0), offsets)
    # One gather does crop and flip; all channels of an image read the same indices.
    indices = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
    indices = indices.view(num, 1, height * width).expand(num, channels, height * width)
    return padded.gather(2, indices).view_as(images)


class Normalise:
    """Conversion of bytes to floats: (x / 255 - mean) / std, per channel."""

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        centre, spread = torch.tensor([mean, std], dtype=torch.float64).view(2, 1, -1, 1, 1)
        self._scale = (1 / (255 * spread)).to(device, torch.float32)
        self._shift = (centre / spread).to(device, torch.float32)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise a batch, to float32."""
        normalised = images.float().mul_(self._scale).sub_(self._shift)
        return normalised.to(memory_format=self._format)
