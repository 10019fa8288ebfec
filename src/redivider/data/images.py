"""Images in memory: bytes that are moved to the device once, and batches built there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redivider.data.augment import Normalise, crop_and_flip
from redivider.data.batches import Batch, Batches, Span
from redivider.data.errors import DataError
from redivider.data.order import draw, permutation


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images in memory, and their usual augmentation.

    images = load("cifar10", train=True)
    batches = images.batches(64, train=True, seed=0, device="cuda")
    """

    name: str
    pixels: Tensor
    """Images, uint8 of shape (N, C, H, W)."""
    labels: Tensor
    """Classes, int64 of shape (N,)."""
    num_classes: int
    mean: tuple[float, ...]
    """Mean of each channel, of pixels scaled to [0, 1]."""
    std: tuple[float, ...]
    """Standard deviation of each channel, of pixels scaled to [0, 1]."""
    padding: int = 0
    """Width of the border of zeros for random crops."""
    flip: bool = False
    """True to mirror half of the images at random."""

    def __post_init__(self) -> None:
        num, channels = self.pixels.shape[:2]
        assert self.pixels.dtype == torch.uint8 and self.pixels.dim() == 4
        assert self.labels.dtype == torch.int64 and self.labels.shape == (num,)
        assert len(self.mean) == len(self.std) == channels
        if not 0 <= self.padding < self.image_size:
            raise DataError(f"padding must be 0 to {self.image_size - 1}, got {self.padding}")
        if num and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.num_classes:
            raise DataError(f"{self.name} has labels outside 0 to {self.num_classes - 1}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.pixels.shape[1]

    @property
    def image_size(self) -> int:
        """Number of rows of an image, which is square."""
        return self.pixels.shape[2]

    def batches(
        self,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> "ImageBatches":
        """Return batches of normalised images and their labels.

        Args:
            batch_size: Number of images in a batch.
            train: Shuffle, crop and flip; otherwise take all images unchanged, in order.
            seed: Seed of the order, the crops and the flips.
            device: Device of the batches; the images are moved there if they fill at most half of
                its free memory.
            channels_last: Whether the images have the channels-last memory format.
        """
        normalise = Normalise(self.mean, self.std, device=device, channels_last=channels_last)
        return ImageBatches(self, normalise, batch_size, train=train, seed=seed, device=device)


@dataclass(frozen=True)
class _Epoch:
    """Random numbers of an epoch, by position."""

    number: int
    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor


class ImageBatches(Batches):
    """Batches of images in memory, created by `Images.batches`."""

    def __init__(
        self, images: Images, normalise: Normalise, batch_size: int, **options: Any
    ) -> None:
        super().__init__(images.name, len(images), batch_size, **options)
        storage = self.device if _fits(images.pixels, self.device) else torch.device("cpu")
        self._pixels, self._labels = images.pixels.to(storage), images.labels.to(storage)
        self._normalise, self._padding, self._flip = normalise, images.padding, images.flip
        self._epoch: _Epoch | None = None

    def _take(self, span: Span) -> Batch:
        positions = slice(span.start, span.stop)
        if not self.train:
            x = self._to_device(self._pixels[positions])
            y = self._to_device(self._labels[positions])
            return self._normalise(x), y.clone()  # not a view, which a caller could write through
        epoch = self._draw_epoch(span.epoch)
        index = epoch.order[positions]
        x, y = self._to_device(self._pixels[index]), self._to_device(self._labels[index])
        if self._padding or self._flip:
            crop = epoch.top[positions], epoch.left[positions], epoch.flip[positions]
            x = crop_and_flip(x, *crop, padding=self._padding)
        return self._normalise(x), y

    def _draw_epoch(self, number: int) -> _Epoch:
        """Return the random numbers of an epoch; keep them, since the next step needs them too."""
        if self._epoch is None or self._epoch.number != number:
            key = {"seed": self.seed, "epoch": number}
            order = permutation(self.num_samples, device=self._pixels.device, **key)
            positions = torch.arange(self.num_samples, device=self.device)
            bits = draw(positions, purpose="crop and flip", **key)
            # One number gives all three: top and left in base `offsets`, and a bit for the flip.
            offsets = 2 * self._padding + 1
            flip = (bits // offsets**2 % 2).bool() & self._flip
            self._epoch = _Epoch(number, order, bits % offsets, bits // offsets % offsets, flip)
        return self._epoch

    def _to_device(self, batch: Tensor) -> Tensor:
        if batch.device == self.device:
            return batch
        return batch.pin_memory().to(self.device, non_blocking=True)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    """Return True if the pixels take at most half of the free memory; models need memory too."""
    if device.type != "cuda" or pixels.device == device:
        return True
    return pixels.nbytes <= torch.cuda.mem_get_info(device)[0] // 2
