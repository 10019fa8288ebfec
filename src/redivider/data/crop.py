"""Crops of image files: random for training (Szegedy et al. 2015), the centre for evaluation.

Boxes and resampling are those of torchvision's RandomResizedCrop, Resize and CenterCrop on PIL
images. The random numbers are a function of (seed, epoch, index).
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
    """Crop a random box, resize it to a square, mirror it half of the time: (3, size, size)."""
    # Every image has its own positions: four numbers per try, and one for the flip.
    positions = torch.arange(index * (4 * TRIES + 1), (index + 1) * (4 * TRIES + 1), device="cpu")
    bits = draw(positions, seed=seed, epoch=epoch, purpose="random crop")
    *uniform, flip = ((bits >> 10).double() / 2**53).tolist()
    image = _open(path)
    left, top, width, height = random_box(image.width, image.height, uniform)
    pil = require("PIL.Image", "an image file")
    # Not `resize(box=...)`, which also reads the pixels around the box.
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((size, size), pil.Resampling.BILINEAR)
    if flip < 0.5:
        image = image.transpose(pil.Transpose.FLIP_LEFT_RIGHT)
    return _pixels(image)


def random_box(width: int, height: int, uniform: list[float]) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a box of random area and aspect within an image.

    Each of ten tries takes four numbers of [0, 1). If no box fits, return the central one.
    """
    low, high = (math.log(ratio) for ratio in ASPECT)
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
    """Resize the shorter side to 8 / 7 of `size`, and crop the central square: (3, size, size)."""
    image = _open(path)
    short = round(size * 8 / 7)  # 256 for 224
    width, height = image.size
    if width < height:
        resized = short, int(short * height / width)
    else:
        resized = int(short * width / height), short
    image = image.resize(resized, require("PIL.Image", "an image file").Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in resized)
    return _pixels(image.crop((left, top, left + size, top + size)))


def _open(path: Path) -> Any:
    pil = require("PIL.Image", "an image file")
    try:
        with pil.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # every format raises its own class
        raise DataError(
            f"{path} cannot be read as an image ({reason(error)}); get it again, or delete it"
        ) from None


def _pixels(image: Any) -> Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)
