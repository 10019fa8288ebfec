"""ImageNet from class folders, and ImageNet32 (images of 32 x 32) from its archives.

Deng et al. 2009; Chrabaszcz, Loshchilov and Hutter 2017 (ImageNet32). Both require an account, so
neither is downloaded. ImageNet32 is held in memory: 4 GB, and twice that while it is read.
"""

from pathlib import Path

import torch

from redivider.data.errors import DataError
from redivider.data.files import VARIABLE, read_files, search_folders
from redivider.data.folder import Folder
from redivider.data.images import Images
from redivider.data.rows import pickled_rows

SITE = "https://image-net.org/download-images"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read_imagenet32(folder: str | Path | None = None, *, train: bool) -> Images:
    """Read ImageNet32 from `Imagenet32_train.zip` and `Imagenet32_val.zip`, packed or unpacked."""
    split = "train" if train else "val"
    names = tuple(f"train_data_batch_{i}" for i in range(1, 11)) if train else ("val_data",)
    archive = f"Imagenet32_{split}.zip"
    advice = f"get {archive} again from {SITE}"
    path = _find(folder, archive, names[0])
    rows = {
        name: pickled_rows(content, path / name, advice, labels="labels", num_classes=1000, first=1)
        for name, content in read_files(path, names, advice=advice)
    }
    pixels = torch.cat([rows[name][0] for name in names]).view(-1, 3, 32, 32)
    labels = torch.cat([rows[name][1] for name in names])
    return Images(
        "imagenet32", pixels, labels, num_classes=1000, mean=MEAN, std=STD, padding=4, flip=True
    )


def _find(folder: str | Path | None, archive: str, first: str) -> Path:
    """Find the folder of the unpacked files, or else the archive."""
    folders = search_folders(folder, "imagenet32")
    for parent in folders:
        for path in (parent, parent / archive.removesuffix(".zip")):
            if (path / first).is_file():
                return path
    for parent in folders:
        if (parent / archive).is_file():
            return parent / archive
    raise DataError(
        f"there is no imagenet32 in {folders[0]}; put {archive} there from {SITE}, "
        f"or set {VARIABLE} to a folder that has it"
    )


def read_imagenet(
    folder: str | Path | None = None, *, train: bool, image_size: int = 224
) -> Folder:
    """Read ImageNet from `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`."""
    folders = search_folders(folder, "imagenet")
    split = "train" if train else "val"
    for parent in folders:
        if (parent / split).is_dir():
            return Folder(
                parent / split,
                name="imagenet",
                # Both splits number their classes alike, even if one lacks a class.
                classes_of=parent / "train" if (parent / "train").is_dir() else None,
                mean=MEAN,
                std=STD,
                image_size=image_size,
            )
    raise DataError(
        f"there is no imagenet in {folders[0]}; unpack it from {SITE} to {split}/CLASS/*.JPEG "
        f"there, or set {VARIABLE} to a folder that has it"
    )
