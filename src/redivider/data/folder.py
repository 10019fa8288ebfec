"""Images in class folders, decoded and cropped by worker processes, normalised on the device."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from redivider.data.augment import Normalise
from redivider.data.batches import Batch, Batches, Span
from redivider.data.crop import central_crop, random_crop
from redivider.data.errors import DataError
from redivider.data.order import permutation

SUFFIXES = (".jpeg", ".jpg", ".png")


class Folder:
    """Images in class folders; classes are numbered in the order of their names.

    images = Folder("imagenet/train", mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    batches = images.batches(64, train=True, seed=0, device="cuda", num_workers=8)
    """

    channels = 3

    def __init__(
        self,
        root: str | Path,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        image_size: int = 224,
        name: str = "folder",
        classes_of: str | Path | None = None,
    ) -> None:
        """List the images.

        Args:
            root: Folder with the class folders.
            mean: Mean of each channel, of pixels scaled to [0, 1].
            std: Standard deviation of each channel, of pixels scaled to [0, 1].
            image_size: Rows and columns of the images in a batch.
            name: Name of the data set.
            classes_of: Folder whose class folders define the numbers of the classes; `root` unless
                set.
        """
        if isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1:
            raise DataError(f"image_size must be a whole number, 1 or more, got {image_size!r}")
        self.root, self.name, self.mean, self.std = Path(root), name, mean, std
        self.image_size = image_size
        self.classes = _class_names(self.root if classes_of is None else Path(classes_of))
        label_of = {class_name: i for i, class_name in enumerate(self.classes)}
        names, labels = [], []
        for class_name in _class_names(self.root):
            if class_name not in label_of:
                raise DataError(
                    f"{self.root / class_name} is a class that {classes_of} does not have"
                )
            files = _image_names(self.root / class_name)
            names += [f"{class_name}/{file}" for file in files]
            labels += [label_of[class_name]] * len(files)
        self.labels = torch.tensor(labels, device="cpu")
        self.paths = Paths(self.root, names)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def batches(
        self,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
        num_workers: int | None = None,
    ) -> "FolderBatches":
        """Return batches of normalised images and their labels.

        Args:
            batch_size: Number of images in a batch.
            train: Shuffle, crop at random and flip; otherwise take the centre of all images, in
                order.
            seed: Seed of the order, the crops and the flips.
            device: Device of the batches.
            channels_last: Whether the images have the channels-last memory format.
            num_workers: Number of processes that decode ahead for `since`; 0 for none, by default
                one per core, up to 8. The batches do not depend on it.
        """
        normalise = Normalise(self.mean, self.std, device=device, channels_last=channels_last)
        workers = min(8, _num_cores()) if num_workers is None else num_workers
        return FolderBatches(
            self, normalise, workers, batch_size, train=train, seed=seed, device=device
        )


class Paths:
    """Paths stored in two tensors.

    Forked workers would copy a list of strings page by page, since reference counts live in it.
    """

    def __init__(self, root: Path, names: list[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.root = root
        self._ends = torch.tensor([len(name) for name in encoded], device="cpu").cumsum(0)
        self._bytes = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8)

    def __getitem__(self, index: int) -> Path:
        start = int(self._ends[index - 1]) if index else 0
        return self.root / os.fsdecode(bytes(self._bytes[start : self._ends[index]].tolist()))


class FolderBatches(Batches):
    """Batches of images in class folders, created by `Folder.batches`."""

    def __init__(
        self,
        folder: Folder,
        normalise: Normalise,
        num_workers: int,
        batch_size: int,
        **options: Any,
    ) -> None:
        super().__init__(folder.name, len(folder), batch_size, **options)
        self._reader = _Reader(folder, train=self.train, seed=self.seed)
        self._normalise, self._num_workers = normalise, num_workers

    def _take(self, span: Span) -> Batch:
        return self._finish(self._reader[span])

    def _iterate(self, spans: Iterable[Span]) -> Iterator[Batch]:
        # A worker reads a whole batch. The generator seeds the workers, which draw nothing from it;
        # without one, the loader would advance the caller's global generator.
        loader = DataLoader(
            self._reader,
            batch_size=None,
            sampler=spans,
            num_workers=self._num_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
        )
        return map(self._finish, loader)

    def _finish(self, batch: "Batch | str") -> Batch:
        if isinstance(batch, str):
            raise DataError(batch)
        x, y = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        return self._normalise(x), y


class _Reader(Dataset["Batch | str"]):
    """Data set of the workers: bytes and labels of a span, or the message of an error."""

    def __init__(self, folder: Folder, *, train: bool, seed: int) -> None:
        self._paths, self._labels, self._size = folder.paths, folder.labels, folder.image_size
        self._train, self._seed = train, seed
        self._order: tuple[int, Tensor] | None = None

    def __getitem__(self, span: Span) -> "Batch | str":
        index = self._indices(span)
        try:
            images = [self._image(int(i), span.epoch) for i in index]
        except DataError as error:
            return str(error)  # if raised, the loader would put a traceback into the message
        return torch.stack(images), self._labels[index]

    def _indices(self, span: Span) -> Tensor:
        if not self._train:
            return torch.arange(span.start, span.stop, device="cpu")
        if self._order is None or self._order[0] != span.epoch:
            order = permutation(len(self._labels), seed=self._seed, epoch=span.epoch)
            self._order = span.epoch, order
        return self._order[1][span.start : span.stop]

    def _image(self, index: int, epoch: int) -> Tensor:
        path = self._paths[index]
        if self._train:
            return random_crop(path, self._size, seed=self._seed, epoch=epoch, index=index)
        return central_crop(path, self._size)


def _class_names(root: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise DataError(f"cannot list {root} ({error.strerror}); is it a folder?") from None
    if not names:
        raise DataError(f"{root} has no class folders; put each image into a folder of its class")
    return names


def _image_names(folder: Path) -> list[str]:
    names = sorted(
        entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES)
    )
    if not names:
        raise DataError(f"{folder} has no images; unpack its archive again, or delete the folder")
    return names


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
