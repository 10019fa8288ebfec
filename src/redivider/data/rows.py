"""Rows of 3,072 bytes, in which CIFAR and ImageNet32 store an image of 32 x 32, channel by channel.

A row of a binary file begins with its label (CIFAR-100: a coarse and a fine one). A python file is
a pickled dictionary of all rows and all labels.
"""

from pathlib import Path

import torch
from torch import Tensor

from redivider.data.errors import DataError
from redivider.data.pickled import read_pickle

PIXELS = 3 * 32 * 32

Rows = tuple[Tensor, Tensor]


def binary_rows(
    content: bytes, where: Path, advice: str, *, num_labels: int, num_classes: int
) -> Rows:
    """Return images (N, 3072) and labels of a binary file; of several labels, take the last."""
    size = num_labels + PIXELS
    if not content or len(content) % size:
        raise DataError(f"{where} has {len(content):,} bytes, not rows of {size:,}; {advice}")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, size)
    labels = rows[:, num_labels - 1].long()
    return rows[:, num_labels:], _verify_labels(labels, num_classes, where, advice)


def pickled_rows(
    content: bytes, where: Path, advice: str, *, labels: str, num_classes: int, first: int = 0
) -> Rows:
    """Return images (N, 3072) and labels of a pickled dictionary.

    Args:
        content: Bytes of the pickle.
        where: Origin of the pickle, for errors.
        advice: Remedy to append to errors.
        labels: Key of the labels.
        num_classes: Number of classes.
        first: Number of the first class; it becomes 0.
    """
    contents = read_pickle(content, where=where, advice=advice)
    for key in ("data", labels):
        if key not in contents:
            raise DataError(f"{where} has no {key!r}; {advice}")
    pixels, classes = contents["data"], contents[labels]
    if isinstance(classes, list) and all(isinstance(label, int) for label in classes):
        classes = torch.tensor(classes, dtype=torch.int64, device="cpu")
    if not isinstance(classes, Tensor) or classes.is_floating_point():
        raise DataError(f"{where} has labels that are not whole numbers; {advice}")
    if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
        raise DataError(f"{where} has images that are not bytes; {advice}")
    if not len(pixels) or pixels.shape[1:] != (PIXELS,) or classes.shape != (len(pixels),):
        raise DataError(
            f"{where} has images of shape {tuple(pixels.shape)} and labels of shape "
            f"{tuple(classes.shape)}, not (N, {PIXELS}) and (N,); {advice}"
        )
    return pixels, _verify_labels(classes.long() - first, num_classes, where, advice)


def _verify_labels(labels: Tensor, num_classes: int, where: Path, advice: str) -> Tensor:
    if int(labels.min()) < 0 or int(labels.max()) >= num_classes:
        raise DataError(f"{where} has labels of more than {num_classes} classes; {advice}")
    return labels
