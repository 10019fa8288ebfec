"""CIFAR-10 and CIFAR-100 in their official forms: python or binary, unpacked or not.

Krizhevsky 2009, "Learning multiple layers of features from tiny images".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from redivider.data.download import download as fetch
from redivider.data.errors import DataError
from redivider.data.files import VARIABLE, data_folder, places, read_files
from redivider.data.images import Images
from redivider.data.rows import Rows, binary_rows, pickled_rows

SITE = "https://www.cs.toronto.edu/~kriz"
# PETRA's recipe takes the same for both.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def read_cifar10(folder: str | Path | None = None, *, train: bool, download: bool = True) -> Images:
    """CIFAR-10, downloaded if it is not there."""
    return _read(CIFAR10, folder, train=train, download=download)


def read_cifar100(
    folder: str | Path | None = None, *, train: bool, download: bool = True
) -> Images:
    """CIFAR-100 with its fine labels, downloaded if it is not there."""
    return _read(CIFAR100, folder, train=train, download=download)


@dataclass(frozen=True)
class Form:
    """One official form: its names, and how to read a file of it."""

    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[bytes, Path, str], Rows]
    """Content, where it is from, and what to do if it is wrong."""


@dataclass(frozen=True)
class Kind:
    """One of the two data sets; its first form is the one to download."""

    name: str
    num_classes: int
    forms: tuple[Form, ...]


def _read(kind: Kind, folder: str | Path | None, *, train: bool, download: bool) -> Images:
    place, form = _find(kind, folder, download=download)
    advice = f"delete {place} to download it again, or get {SITE}/{form.archive}"
    names = form.train if train else form.test
    rows = {
        name: form.read(content, place / name, advice)
        for name, content in read_files(place, names, advice=advice)
    }
    if len({len(labels) for _, labels in rows.values()}) != 1:
        raise DataError(f"{place} has batches of different sizes, some cut short; {advice}")
    return Images(
        kind.name,
        torch.cat([rows[name][0] for name in names]).view(-1, 3, 32, 32),
        torch.cat([rows[name][1] for name in names]),
        num_classes=kind.num_classes,
        mean=MEAN,
        std=STD,
        padding=4,
        flip=True,
    )


def _find(kind: Kind, folder: str | Path | None, *, download: bool) -> tuple[Path, Form]:
    """What there is: unpacked before packed, which takes a second longer to read."""
    homes = places(folder, kind.name)
    unpacked = [(home / form.folder, form) for home in homes for form in kind.forms]
    packed = [(home / form.archive, form) for home in homes for form in kind.forms]
    for path, form in unpacked + packed:
        if path.exists():
            return path, form
    form = kind.forms[0]
    url, path = f"{SITE}/{form.archive}", data_folder(folder) / form.archive
    if not download:
        raise DataError(
            f"there is no {kind.name} in {path.parent}; put {form.archive} there from {url}, "
            f"or set {VARIABLE} to a folder that has it"
        )
    fetch(url, path, md5=form.md5)
    return path, form


CIFAR10 = Kind(
    "cifar10",
    10,
    (
        Form(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            ("test_batch.bin",),
            partial(binary_rows, num_labels=1, num_classes=10),
        ),
        Form(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            tuple(f"data_batch_{i}" for i in range(1, 6)),
            ("test_batch",),
            partial(pickled_rows, labels="labels", num_classes=10),
        ),
    ),
)

CIFAR100 = Kind(
    "cifar100",
    100,
    (
        Form(
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            ("train.bin",),
            ("test.bin",),
            partial(binary_rows, num_labels=2, num_classes=100),
        ),
        Form(
            "cifar-100-python",
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            ("train",),
            ("test",),
            partial(pickled_rows, labels="fine_labels", num_classes=100),
        ),
    ),
)
