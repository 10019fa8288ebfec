"""Rows of 3,072 bytes: how CIFAR and ImageNet32 keep an image of 32 x 32, plane by plane.

A row of a binary file begins with its label (CIFAR-100: a coarse and a fine one); a python file is
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
    """Images (N, 3072) and labels of a binary file; of several labels the last."""
    row = num_labels + PIXELS
    if not content or len(content) % row:
        raise DataError(f"{where} has {len(content):,} bytes, not rows of {row:,}; {advice}")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, row)
    labels = rows[:, num_labels - 1].long()
    return rows[:, num_labels:], _verified(labels, num_classes, where, advice)


def pickled_rows(
    content: bytes, where: Path, advice: str, *, labels: str, num_classes: int, first: int = 0
) -> Rows:
    """Images (N, 3072) and labels of a pickled dictionary.

    Args:
        content: The pickle.
        where: Where it is from, for errors.
        advice: What to do when something is wrong, for errors.
        labels: The key of the labels.
        num_classes: How many there may be.
        first: The number of the first class; it becomes 0.
    """
    found = read_pickle(content, where=where, advice=advice)
    for key in ("data", labels):
        if key not in found:
            raise DataError(f"{where} has no {key!r}; {advice}")
    pixels, numbers = found["data"], found[labels]
    if isinstance(numbers, list) and all(isinstance(each, int) for each in numbers):
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if not isinstance(numbers, Tensor) or numbers.is_floating_point():
        raise DataError(f"{where} has labels that are not whole numbers; {advice}")
    if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
        raise DataError(f"{where} has images that are not bytes; {advice}")
    if not len(pixels) or pixels.shape[1:] != (PIXELS,) or numbers.shape != (len(pixels),):
        raise DataError(
            f"{where} has images of shape {tuple(pixels.shape)} and labels of shape "
            f"{tuple(numbers.shape)}, not (N, {PIXELS}) and (N,); {advice}"
        )
    return pixels, _verified(numbers.long() - first, num_classes, where, advice)


def _verified(labels: Tensor, num_classes: int, where: Path, advice: str) -> Tensor:
    if int(labels.min()) < 0 or int(labels.max()) >= num_classes:
        raise DataError(f"{where} has labels of more than {num_classes} classes; {advice}")
    return labels
