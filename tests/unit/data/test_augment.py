"""A whole batch at once equals a slow loop over its images."""

import pytest
import torch
from support.images import one_by_one

from redivider.data.augment import Normalise, crop_and_flip

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip(shape, padding, dtype):
    images = torch.randint(1, 256, (40, *shape)).to(dtype)
    top, left = torch.randint(2 * padding + 1, (2, 40))
    flip = torch.rand(40) < 0.5
    cut = crop_and_flip(images, top, left, flip, padding=padding)
    assert cut.dtype == dtype
    assert torch.equal(cut, one_by_one(images, top, left, flip, padding))


def test_the_middle_cut_is_the_image_and_the_corner_has_black_edges():
    images = torch.randint(1, 256, (2, 3, 6, 6), dtype=torch.uint8)
    top = left = torch.tensor([2, 0])
    cut = crop_and_flip(images, top, left, torch.tensor([False, False]), padding=2)
    assert torch.equal(cut[0], images[0])
    assert not cut[1, :, :2].any() and not cut[1, :, :, :2].any()
    assert torch.equal(cut[1, :, 2:, 2:], images[1, :, :4, :4])


def test_normalise_is_the_formula():
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    mean, std = (torch.tensor(values).double().view(3, 1, 1) for values in (MEAN, STD))
    true = (images / 255.0 - mean) / std
    result = Normalise(MEAN, STD)(images)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), true, rtol=1e-6, atol=1e-6)


def test_formats_hold_the_same_numbers():
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    kept = images.clone()
    plain = Normalise(MEAN, STD)(images)
    last = Normalise(MEAN, STD, channels_last=True)(images)
    assert plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)
    assert torch.equal(images, kept)
