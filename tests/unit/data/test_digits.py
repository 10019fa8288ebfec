"""The digits are those of scikit-learn, split once and for all."""

from typing import Any

import pytest
import torch

from redivider.data import load


@pytest.mark.slow
def test_pixels_and_labels_are_those_of_the_package():
    from sklearn.datasets import load_digits  # only here: the import takes seconds

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for train, index in ((True, order[:1437]), (False, order[1437:])):
        digits = load("digits", train=train)
        x, y = next(iter(digits.batches(len(digits), train=False)))
        assert torch.equal(x.flatten(1), images[index])
        assert torch.equal(y, labels[index])


def test_sizes():
    train: Any = load("digits", train=True)
    test: Any = load("digits", train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert train.pixels.shape == (1437, 1, 8, 8) and int(train.pixels.max()) == 16
    assert (train.channels, train.image_size, train.num_classes) == (1, 8, 10)
    assert (train.padding, train.flip) == (0, False)
    assert len(train.batches(64, train=True)) == 22
