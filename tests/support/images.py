"""Images in memory, batches that are compared, and crops by a slow loop."""

import torch
import torch.nn.functional as F

from redivider.data import Images
from support.archives import make_rows


def one_by_one(images, top, left, flip, padding):
    """Crop and flip images by a slow loop."""
    crops = []
    for image, y, x, mirrored in zip(
        images, top.tolist(), left.tolist(), flip.tolist(), strict=True
    ):
        _, height, width = image.shape
        crop = F.pad(image, (padding,) * 4)[:, y : y + height, x : x + width]
        crops.append(crop.flip(2) if mirrored else crop)
    return torch.stack(crops)


def make_images(num: int = 50, *, padding: int = 4, flip: bool = True) -> Images:
    """Return a small data set of random images."""
    pixels, labels = make_rows(num, 10, seed=3)
    statistics = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}
    return Images(
        "made", pixels.view(-1, 3, 32, 32), labels, 10, **statistics, padding=padding, flip=flip
    )


def equal(one, other) -> bool:
    """Return whether two batches are equal to the last bit."""
    return all(map(torch.equal, one, other))
