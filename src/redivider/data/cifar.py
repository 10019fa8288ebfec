"""CIFAR-10 and CIFAR-100 in their official forms: python or binary, packed or unpacked.

Krizhevsky 2009, "Learning multiple layers of features from tiny images".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from redivider.data.download import download as fetch
from redivider.data.errors import DataError
from redivider.data.files import VARIABLE, data_folder, read_files, search_folders
from redivider.data.images import Images
from redivider.data.rows import Rows, binary_rows, pickled_rows

SITE = "https://www.cs.toronto.edu/~kriz"
# PETRA's recipe uses the same values for both data sets.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def read_cifar10(folder: str | Path | None = None, *, train: bool, download: bool = True) -> Images:
    """Read CIFAR-10; download it if it is missing."""
    return _read(CIFAR10, folder, train=train, download=download)


def read_cifar100(
    folder: str | Path | None = None, *, train: bool, download: bool = True
) -> Images:
    """Read CIFAR-100 with its fine labels; download it if it is missing."""
    return _read(CIFAR100, folder, train=train, download=download)


@dataclass(frozen=True)
class Form:
    """Official form of a data set: the names of its files, and the function that reads one."""

    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[bytes, Path, str], Rows]
    """Reader of a file; called with its content, its path, and the advice for errors."""


@dataclass(frozen=True)
class Kind:
    """Data set: CIFAR-10 or CIFAR-100. The first form is the one to download."""

    name: str
    num_classes: int
    forms: tuple[Form, ...]


def _read(kind: Kind, folder: str | Path | None, *, train: bool, download: bool) -> Images:
    path, form = _find(kind, folder, download=download)
    advice = f"delete {path} to download it again, or get {SITE}/{form.archive}"
    names = form.train if train else form.test
    rows = {
        name: form.read(content, path / name, advice)
        for name, content in read_files(path, names, advice=advice)
    }
    if len({len(labels) for _, labels in rows.values()}) != 1:
        raise DataError(f"{path} has batches of different sizes, some cut short; {advice}")
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
    """Find or download the data; prefer unpacked files, which read a second faster."""
    folders = search_folders(folder, kind.name)
    unpacked = [(parent / form.folder, form) for parent in folders for form in kind.forms]
    packed = [(parent / form.archive, form) for parent in folders for form in kind.forms]
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
