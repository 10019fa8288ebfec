"""Images in class folders: the same batches with and without workers, from any step on."""

import math
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.archives import write_classes

from redivider.data import DataError, Folder
from redivider.data.augment import Normalise
from redivider.data.crop import central_crop, random_box, random_crop
from redivider.data.order import permutation

# Python 3.12 warns of workers that are forked from a process with threads, as pytest's may be.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

STATISTICS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}


@pytest.fixture
def folder(tmp_path) -> Folder:
    write_classes(tmp_path / "images", {"a": 4, "b": 5, "ü": 3})
    return Folder(tmp_path / "images", image_size=24, **STATISTICS)


def equal(one, other) -> bool:
    return all(map(torch.equal, one, other))


def test_a_training_batch_is_what_a_loop_makes(folder):
    order = permutation(12, seed=4, epoch=1)[5:10]
    crops = [random_crop(folder.paths[int(i)], 24, seed=4, epoch=1, index=int(i)) for i in order]
    x, y = folder.batches(5, train=True, seed=4)[3]
    assert torch.equal(x, Normalise(**STATISTICS)(torch.stack(crops)))
    assert torch.equal(y, folder.labels[order])


def test_a_crop_is_one_of_the_file(tmp_path):
    """On a ramp, a resized part of the image is a ramp of known ends."""
    ramp = torch.arange(240).byte().expand(160, 240)
    image = torch.stack([ramp, ramp, torch.arange(160).byte()[:, None].expand(160, 240)], -1)
    path = tmp_path / "ramp.png"
    Image.fromarray(image.contiguous().numpy()).save(path)
    mirrored = 0
    for index in range(40):
        crop = random_crop(path, 16, seed=0, epoch=0, index=index).double()
        rows, columns = crop[2].diff(dim=0), crop[0].diff(dim=1)
        assert (crop[0] == crop[0, :1]).all() and (crop[2] == crop[2, :, :1]).all()
        assert (rows >= 0).all()
        mirrored += bool((columns <= 0).all())
        assert (columns <= 0).all() or (columns >= 0).all()
        height = (crop[2, -1, 0] - crop[2, 0, 0]) * 16 / 15
        width = (crop[0, 0, -1] - crop[0, 0, 0]).abs() * 16 / 15
        assert 0.7 < float(width / height) < 1.45
        assert 0.06 < float(width * height) / (160 * 240) < 1.05
    assert 8 < mirrored < 32


@given(
    st.integers(1, 500),
    st.integers(1, 500),
    st.lists(st.floats(0, 1 - 2**-53), min_size=40, max_size=40),
)
def test_a_box_lies_within_the_image(width, height, uniform):
    left, top, w, h = random_box(width, height, uniform)
    assert left >= 0 and top >= 0 and w >= 1 and h >= 1
    assert left + w <= width and top + h <= height


def test_boxes_have_the_areas_and_aspects_of_the_paper():
    boxes = [
        random_box(500, 375, torch.rand(40, dtype=torch.float64).tolist()) for _ in range(2000)
    ]
    areas = torch.tensor([w * h / (500 * 375) for _, _, w, h in boxes])
    aspects = torch.tensor([math.log(w / h) for _, _, w, h in boxes])
    assert 0.078 < float(areas.min()) and float(areas.max()) <= 1
    assert 0.4 < float(areas.mean()) < 0.55
    assert aspects.abs().max() < math.log(4 / 3) + 0.02
    lefts = torch.tensor([left / (500 - w) for left, _, w, _ in boxes if w < 400])
    assert 0.45 < float(lefts.mean()) < 0.55 and lefts.min() < 0.02 and lefts.max() > 0.98


def test_a_long_image_gives_its_centre():
    # No area of at least 8 % fits: the widest box of the right aspect, in the middle.
    assert random_box(1000, 10, [0.5] * 40) == ((1000 - 13) // 2, 0, 13, 10)
    assert random_box(10, 1000, [0.5] * 40) == (0, (1000 - 13) // 2, 10, 13)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (64, 64), (20, 90)])
def test_the_central_crop(width, height, tmp_path):
    noise = torch.randint(256, (height, width, 3), dtype=torch.uint8)
    path = tmp_path / "x.png"
    Image.fromarray(noise.numpy()).save(path)
    crop = central_crop(path, 56)
    scale = 64 / min(width, height)
    size = (64, int(height * scale)) if width < height else (int(width * scale), 64)
    whole = Image.open(path).resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 56) / 2), round((size[1] - 56) / 2)
    true = whole.crop((left, top, left + 56, top + 56))
    assert bytes(crop.permute(1, 2, 0).flatten().tolist()) == true.tobytes()


def test_evaluation_is_in_order_and_complete(folder):
    batches = folder.batches(5, train=False, num_workers=0)
    steps = list(batches)
    assert [len(y) for _, y in steps] == [5, 5, 2]
    x, y = map(torch.cat, zip(*steps, strict=True))
    crops = torch.stack([central_crop(folder.paths[i], 24) for i in range(12)])
    assert torch.equal(x, Normalise(**STATISTICS)(crops)) and torch.equal(y, folder.labels)


@FORKS
def test_workers_change_nothing_and_any_step_may_be_the_first(folder):
    plain = folder.batches(5, train=True, num_workers=0)
    true = [plain[step] for step in range(7)]
    assert all(map(equal, plain.since(0), true))
    before = torch.get_rng_state()
    with_workers = folder.batches(5, train=True, num_workers=2)
    for start in (0, 3):
        assert all(map(equal, islice(with_workers.since(start), 7 - start), true[start:]))
    assert len(list(folder.batches(5, train=False, num_workers=1).since(1))) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_formats_of_files(tmp_path):
    (tmp_path / "a").mkdir()
    colour = Image.new("RGB", (30, 30), (200, 10, 10))
    for name, mode in (("x.JPEG", "CMYK"), ("y.jpg", "L"), ("z.png", "RGBA"), ("w.png", "P")):
        colour.convert(mode).save(tmp_path / "a" / name)
    x, _ = Folder(tmp_path, image_size=16, **STATISTICS).batches(4, train=False)[0]
    assert x.shape == (4, 3, 16, 16)


@FORKS
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_image_is_named_in_one_line(folder, num_workers):
    path = folder.paths[6]
    whole = path.read_bytes()
    for content in (b"", b"<html>", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read as an image .*get it again") as caught:
            list(folder.batches(4, train=False, num_workers=num_workers).since(0))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"cannot list .*No such file"):
        Folder(tmp_path / "nowhere", **STATISTICS)
