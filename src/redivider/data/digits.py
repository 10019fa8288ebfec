"""Handwritten digits of scikit-learn: 1,797 images of 8 x 8, part of that package."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from redivider.data.errors import DataError, reason
from redivider.data.images import Images
from redivider.errors import missing

NUM_TRAIN = 1437
NUM_COLUMNS = 65  # 64 pixels and the label


def read_digits(folder: object = None, *, train: bool) -> Images:
    """Read the digits: 1,437 for training and 360 for testing, split by a fixed permutation.

    The folder is ignored, because the data are part of the package.
    """
    *columns, labels = _read_table().T
    pixels = torch.stack(columns, 1).view(-1, 1, 8, 8)
    labels = labels.long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu")
    split = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
    # Pixels are 0 to 16, not 0 to 255: with this std they become x / 16.
    return Images(
        "digits", pixels[split], labels[split], num_classes=10, mean=(0.0,), std=(16 / 255,)
    )


def _read_table() -> Tensor:
    """Read the package's file, one digit per row, without the import, which takes a second."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(missing("sklearn", "the data set digits"))
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode()
        words = ",".join(text.split()).split(",")
        values = {word: int(float(word)) for word in set(words)}  # a few, of 116,805 words
        numbers = bytearray(map(values.__getitem__, words))
        return torch.frombuffer(numbers, dtype=torch.uint8).view(-1, NUM_COLUMNS)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot read {path} ({reason(error)}); install scikit-learn again"
        ) from None
