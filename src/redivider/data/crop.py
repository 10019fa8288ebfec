"""Crops of image files: at random for training (Szegedy et al. 2015), the centre for tests.

The same boxes and the same resampling as torchvision's RandomResizedCrop, Resize and CenterCrop on
PIL images, with random numbers that are a function of (seed, epoch, index).
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redivider.data.errors import DataError, reason, require
from redivider.data.order import draw

AREA = 0.08, 1.0
ASPECT = 3 / 4, 4 / 3
TRIES = 10


def random_crop(path: Path, size: int, *, seed: int, epoch: int, index: int) -> Tensor:
    """A random part of an image, resized to a square and mirrored half of the time: (3, H, W)."""
    places = torch.arange(index * (4 * TRIES + 1), (index + 1) * (4 * TRIES + 1), device="cpu")
    bits = draw(places, seed=seed, epoch=epoch, purpose="random crop")
    *uniform, flip = ((bits >> 10).double() / 2**53).tolist()
    image = _opened(path)
    left, top, width, height = random_box(image.width, image.height, uniform)
    resampling = require("PIL.Image", "an image file")
    # Cropped first: a resize of a box also reads the pixels around it.
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((size, size), resampling.Resampling.BILINEAR)
    if flip < 0.5:
        image = image.transpose(resampling.Transpose.FLIP_LEFT_RIGHT)
    return _pixels(image)


def random_box(width: int, height: int, uniform: list[float]) -> tuple[int, int, int, int]:
    """Left, top, width and height of a box of random area and aspect within an image.

    Ten tries to find one that fits, four numbers of [0, 1) each; then the centre.
    """
    low, high = (math.log(each) for each in ASPECT)
    for attempt in range(TRIES):
        area, aspect, across, down = uniform[4 * attempt : 4 * attempt + 4]
        target = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        ratio = math.exp(low + aspect * (high - low))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(across * (width - w + 1)), int(down * (height - h + 1)), w, h
    w = min(width, round(height * ASPECT[1]))
    h = min(height, round(width / ASPECT[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def central_crop(path: Path, size: int) -> Tensor:
    """The central square of an image whose shorter side was resized to 8 / 7 of it: (3, H, W)."""
    image = _opened(path)
    short = round(size * 8 / 7)  # 256 for 224
    width, height = image.size
    if width < height:
        whole = short, int(short * height / width)
    else:
        whole = int(short * width / height), short
    image = image.resize(whole, require("PIL.Image", "an image file").Resampling.BILINEAR)
    left, top = (round((each - size) / 2) for each in whole)
    return _pixels(image.crop((left, top, left + size, top + size)))


def _opened(path: Path) -> Any:
    pil = require("PIL.Image", "an image file")
    try:
        with pil.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # each format has its own
        raise DataError(
            f"{path} cannot be read as an image ({reason(error)}); get it again, or delete it"
        ) from None


def _pixels(image: Any) -> Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)
