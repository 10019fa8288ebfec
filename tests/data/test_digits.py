"""The digits are those of the example, split as there."""

import importlib.util
from pathlib import Path

import pytest
import torch

from redivider.data import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def test_the_split_is_the_examples():
    if not EXAMPLE.exists():
        pytest.skip("the examples are not here")
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    true = example.load()
    for train, (images, labels) in ((True, true[:2]), (False, true[2:])):
        digits = load("digits", train=train)
        x, y = next(iter(digits.batches(len(digits), train=False)))
        assert torch.equal(x.flatten(1), images)
        assert torch.equal(y, labels)


def test_sizes():
    train, test = load("digits", train=True), load("digits", train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert train.pixels.shape == (1437, 1, 8, 8) and int(train.pixels.max()) == 16
    assert (train.channels, train.image_size, train.num_classes) == (1, 8, 10)
    assert (train.padding, train.flip) == (0, False)
    assert len(train.batches(64, train=True)) == 22
