"""Images in memory: bytes that go to the device once, and batches made of them there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redivider.data.augment import Normalise, crop_and_flip
from redivider.data.batches import Batch, Batches, Span
from redivider.data.errors import DataError
from redivider.data.order import draw, permutation


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, and what is usually done to them in training.

    images = load("cifar10", train=True)
    batches = images.batches(64, train=True, seed=0, device="cuda")
    """

    name: str
    pixels: Tensor
    """uint8 (N, C, H, W)"""
    labels: Tensor
    """int64 (N,)"""
    num_classes: int
    mean: tuple[float, ...]
    """Of each channel, as a part of 255."""
    std: tuple[float, ...]
    padding: int = 0
    """Zeros around an image out of which a random crop is cut."""
    flip: bool = False
    """Whether half of the images are mirrored."""

    def __post_init__(self) -> None:
        num, channels = self.pixels.shape[:2]
        assert self.pixels.dtype == torch.uint8 and self.pixels.dim() == 4
        assert self.labels.dtype == torch.int64 and self.labels.shape == (num,)
        assert len(self.mean) == len(self.std) == channels
        if num and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.num_classes:
            raise DataError(f"{self.name} has labels outside 0 to {self.num_classes - 1}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Of an image."""
        return self.pixels.shape[1]

    @property
    def image_size(self) -> int:
        """Rows of an image; its columns are as many."""
        return self.pixels.shape[2]

    def batches(
        self,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        padding: int | None = None,
        flip: bool | None = None,
    ) -> "ImageBatches":
        """Batches of normalised images and their labels.

        Args:
            batch_size: Images in a batch.
            train: Shuffle, crop and flip; otherwise all images as they are, in order.
            seed: Of the order, the crops and the flips.
            device: Where batches are made; the images are moved there if they fill less than half
                of its free memory.
            dtype: Of the images in a batch.
            channels_last: Their memory format.
            padding: As this set's, unless given; 0 for no random crop.
            flip: As this set's, unless given.
        """
        return ImageBatches(
            self,
            batch_size,
            train=train,
            seed=seed,
            normalise=Normalise(
                self.mean, self.std, device=device, dtype=dtype, channels_last=channels_last
            ),
            device=device,
            padding=self.padding if padding is None else padding,
            flip=self.flip if flip is None else flip,
        )


@dataclass(frozen=True)
class _Epoch:
    """All that is random in an epoch, by position."""

    number: int
    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor


class ImageBatches(Batches):
    """Batches of images in memory; made by `Images.batches`."""

    def __init__(
        self,
        images: Images,
        batch_size: int,
        *,
        train: bool,
        seed: int,
        normalise: Normalise,
        device: torch.device | str,
        padding: int,
        flip: bool,
    ) -> None:
        super().__init__(
            images.name, len(images), batch_size, train=train, seed=seed, device=device
        )
        if not 0 <= padding < images.image_size:
            raise DataError(
                f"padding must be 0 or more and less than the images' size of {images.image_size}, "
                f"got {padding}"
            )
        home = self.device if _fits(images.pixels, self.device) else torch.device("cpu")
        self._pixels, self._labels = images.pixels.to(home), images.labels.to(home)
        self._normalise, self._padding, self._flip = normalise, padding, flip
        self._epoch: _Epoch | None = None

    def _take(self, span: Span) -> Batch:
        here = slice(span.start, span.stop)
        if not self.train:
            x, y = self._sent(self._pixels[here]), self._sent(self._labels[here])
            return self._normalise(x), y.clone()  # not a view of the labels themselves
        epoch = self._drawn(span.epoch)
        index = epoch.order[here]
        x, y = self._sent(self._pixels[index]), self._sent(self._labels[index])
        if self._padding or self._flip:
            cut = epoch.top[here], epoch.left[here], epoch.flip[here]
            x = crop_and_flip(x, *cut, padding=self._padding)
        return self._normalise(x), y

    def _drawn(self, number: int) -> _Epoch:
        """The epoch's random numbers; kept, since the next step most likely needs them too."""
        if self._epoch is None or self._epoch.number != number:
            where = {"seed": self.seed, "epoch": number}
            order = permutation(self.num_samples, device=self._pixels.device, **where)
            positions = torch.arange(self.num_samples, device=self.device)
            chance = draw(positions, purpose="crop and flip", **where)
            cuts = 2 * self._padding + 1
            flip = (chance // cuts**2 % 2).bool() & self._flip
            self._epoch = _Epoch(number, order, chance % cuts, chance // cuts % cuts, flip)
        return self._epoch

    def _sent(self, batch: Tensor) -> Tensor:
        if batch.device == self.device:
            return batch
        return batch.pin_memory().to(self.device, non_blocking=True)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    """Whether they may live there: models need memory too."""
    if device.type != "cuda" or pixels.device == device:
        return True
    return pixels.nbytes <= torch.cuda.mem_get_info(device)[0] // 2
