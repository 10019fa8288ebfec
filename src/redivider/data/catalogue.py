"""Catalogue of all data by name."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from redivider.data.cifar import read_cifar10, read_cifar100
from redivider.data.digits import read_digits
from redivider.data.errors import DataError
from redivider.data.folder import Folder
from redivider.data.imagenet import read_imagenet, read_imagenet32
from redivider.data.images import Images
from redivider.data.text import Text, read_text
from redivider.errors import did_you_mean, no_such

Source = Images | Folder | Text

SOURCES: dict[str, Callable[..., Source]] = {
    "digits": read_digits,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "imagenet32": read_imagenet32,
    "imagenet": read_imagenet,
    "text": read_text,
}


def list_data() -> list[str]:
    """Return the names that `load` knows."""
    return list(SOURCES)


def load(name: str, *, train: bool, folder: str | Path | None = None, **options: Any) -> Source:
    """Load data; `.batches(batch_size, train=...)` returns their batches.

        images = load("cifar10", train=True)
        x, y = images.batches(64, train=True, seed=0, device="cuda")[step]

    Args:
        name: One of `list_data()`.
        train: True for the training set, False for the test or validation set.
        folder: Folder of the files; by default $REDIVIDER_DATA, or else ~/.cache/redivider.
        **options: `download=False` (cifar10, cifar100), `image_size` (imagenet), `tokens` (text).
    """
    if name not in SOURCES:
        raise DataError(no_such("data", name, SOURCES, f"it is one of {', '.join(SOURCES)}"))
    read = SOURCES[name]
    known = [param for param in signature(read).parameters if param not in ("folder", "train")]
    for option in options:
        if option not in known:
            otherwise = f"it has one of {', '.join(known)}" if known else "it has none"
            hint = did_you_mean(option, known, otherwise)
            raise DataError(f"{name} has no option {option!r}; {hint}")
    return read(folder, train=train, **options)
