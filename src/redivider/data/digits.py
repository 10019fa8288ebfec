"""scikit-learn's handwritten digits: 1,797 images of 8 x 8, part of that package."""

import torch

from redivider.data.errors import require
from redivider.data.images import Images

NUM_TRAIN = 1437


def read_digits(folder: object = None, *, train: bool) -> Images:
    """The digits: 1,437 to train with and 360 to test, by a permutation that never changes.

    The folder has no use here: nothing is read but the package.
    """
    digits = require("sklearn.datasets", "scikit-learn").load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.uint8, device="cpu").unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64, device="cpu")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu")
    chosen = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
    # Pixels go from 0 to 16, not to 255: with this deviation they become x / 16.
    return Images(
        "digits", pixels[chosen], labels[chosen], num_classes=10, mean=(0.0,), std=(16 / 255,)
    )
