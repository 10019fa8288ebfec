"""ImageNet32 from its archives and ImageNet from class folders."""

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import imagenet32_files, write_classes, write_folder, write_zip

from redivider.data import DataError, load


@pytest.mark.slow
@pytest.mark.parametrize("below", ["", "imagenet32"])
@pytest.mark.parametrize("layout", ["zip", "zip with a folder", "unpacked", "unpacked by archive"])
def test_imagenet32_is_read(layout, below, tmp_path):
    files, true = imagenet32_files()
    for split, content in files.items():
        home = tmp_path / below
        if layout == "unpacked":
            write_folder(home / "x", content)
            for path in (home / "x").iterdir():
                path.rename(home / path.name)
            (home / "x").rmdir()
        elif layout == "unpacked by archive":
            write_folder(home / f"Imagenet32_{split}", content)
        else:
            prefix = "Imagenet32/" if "folder" in layout else ""
            named = {prefix + name: data for name, data in content.items()}
            write_zip(home / f"Imagenet32_{split}.zip", named)
    for train in (True, False):
        images: Any = load("imagenet32", train=train, folder=tmp_path)
        pixels, labels = true["train" if train else "val"]
        assert torch.equal(images.pixels, pixels.view(-1, 3, 32, 32))
        assert torch.equal(images.labels, labels)
        assert images.num_classes == 1000 and images.padding == 4 and images.flip
    batches = load("imagenet32", train=True, folder=tmp_path).batches(16, train=True)
    assert all(x.isfinite().all() for x, _ in islice(batches.since(0), 50))


def test_imagenet32_that_is_damaged(tmp_path):
    files, _ = imagenet32_files()
    refused("imagenet32", tmp_path, "there is no imagenet32 in", "Imagenet32_train.zip")
    path = tmp_path / "Imagenet32_train.zip"
    write_zip(path, files["train"])
    whole = path.read_bytes()
    for part in (0, 0.2, 0.9, 0.9999):
        path.write_bytes(whole[: int(part * len(whole))])
        refused("imagenet32", tmp_path, "damaged or cut short", "get Imagenet32_train.zip again")
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    refused("imagenet32", tmp_path, "damaged or cut short")
    del files["train"]["train_data_batch_7"]
    write_zip(path, files["train"])
    refused("imagenet32", tmp_path, "has no file train_data_batch_7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0] * 6}, "has labels of more than 1000 classes"),
        ({"labels": [1001] * 6}, "has labels of more than 1000 classes"),
        ({"labels": [1] * 5}, r"labels of shape \(5,\)"),
        ({"labels": ["one"] * 6}, "labels that are not whole numbers"),
        ({"labels": [1.0] * 6}, "labels that are not whole numbers"),
        ({"labels": torch.ones(6).numpy()}, "labels that are not whole numbers"),
        ({"labels": None}, "labels that are not whole numbers"),
        ({"data": [1, 2, 3]}, "images that are not bytes"),
        ({"data": torch.zeros(6, 3072).numpy()}, "images that are not bytes"),
        ({"data": torch.zeros(6, 3071, dtype=torch.uint8).numpy()}, r"not \(N, 3072\)"),
        ({"data": torch.zeros(0, 3072, dtype=torch.uint8).numpy(), "labels": []}, "not .N, 3072"),
    ],
)
def test_imagenet32_with_wrong_content(change, message, tmp_path):
    files, _ = imagenet32_files()
    content = {**pickle.loads(files["val"]["val_data"]), **change}
    write_zip(tmp_path / "Imagenet32_val.zip", {"val_data": pickle.dumps(content)})
    refused("imagenet32", tmp_path, r"Imagenet32_val\.zip/val_data", message, train=False)
    del content["data"]
    write_zip(tmp_path / "Imagenet32_val.zip", {"val_data": pickle.dumps(content)})
    refused("imagenet32", tmp_path, "has no 'data'", train=False)


@pytest.mark.parametrize("below", ["", "imagenet"])
def test_imagenet_is_read(below, tmp_path):
    write_classes(tmp_path / below / "train", {"n02": 3, "n01": 4, "n10": 2})
    write_classes(tmp_path / below / "val", {"n10": 2, "n01": 1})
    (tmp_path / below / "train" / "n01" / "notes.txt").write_text("not an image")
    train: Any = load("imagenet", train=True, folder=tmp_path, image_size=32)
    assert train.classes == ["n01", "n02", "n10"]
    assert train.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 2
    assert (train.num_classes, train.channels, train.image_size) == (3, 3, 32)
    val: Any = load("imagenet", train=False, folder=tmp_path)
    assert val.labels.tolist() == [0, 2, 2] and val.num_classes == 3  # numbered as in training
    assert val.image_size == 224
    batches = train.batches(4, train=True, num_workers=0)
    for x, y in islice(batches.since(0), 50):
        assert x.shape == (4, 3, 32, 32) and x.isfinite().all() and int(y.max()) < 3


def test_imagenet_that_is_not_as_it_should_be(tmp_path):
    refused("imagenet", tmp_path, "there is no imagenet in", "train/CLASS/.*JPEG", "REDIVIDER_DATA")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").write_bytes(b"")
    refused("imagenet", tmp_path, "val has no class folders", train=False)
    write_classes(tmp_path / "train", {"n01": 1, "n02": 0})
    refused("imagenet", tmp_path, "n02 has no images")
    write_classes(tmp_path / "val", {"n03": 1})
    refused("imagenet", tmp_path, "n03 is a class that .*train does not have", train=False)
    refused("imagenet", tmp_path, "image_size must be a whole number", image_size=0)


def refused(name: str, folder: Path, *messages: str, train: bool = True, **options) -> None:
    with pytest.raises(DataError) as caught:
        load(name, train=train, folder=folder, **options)
    assert "\n" not in str(caught.value)
    for message in messages:
        caught.match(message)
