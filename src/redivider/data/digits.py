"""scikit-learn's handwritten digits: 1,797 images of 8 x 8, part of that package."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from redivider.data.errors import DataError, reason
from redivider.data.images import Images
from redivider.errors import missing

NUM_TRAIN = 1437
NUM_COLUMNS = 65  # of a row: pixels, and the label


def read_digits(folder: object = None, *, train: bool) -> Images:
    """The digits: 1,437 to train with and 360 to test, by a permutation that never changes.

    The folder has no use here: nothing is read but the package.
    """
    *columns, labels = _table().T  # 64 pixels of a row, and its label
    pixels = torch.stack(columns, 1).view(-1, 1, 8, 8)
    labels = labels.long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu")
    chosen = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
    # Pixels go from 0 to 16, not to 255: with this deviation they become x / 16.
    return Images(
        "digits", pixels[chosen], labels[chosen], num_classes=10, mean=(0.0,), std=(16 / 255,)
    )


def _table() -> Tensor:
    """The file of the package, a digit a row; importing the package would take a second."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(missing("sklearn", "the data set digits"))
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode()
        numbers = bytearray(int(float(each)) for each in ",".join(text.split()).split(","))
        return torch.frombuffer(numbers, dtype=torch.uint8).view(-1, NUM_COLUMNS)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot read {path} ({reason(error)}); install scikit-learn again"
        ) from None
