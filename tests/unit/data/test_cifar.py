"""CIFAR in its official forms: all of them agree, and what is damaged says so."""

import dataclasses
import hashlib
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import FOLDERS, cifar_files, write_cifar, write_folder, write_tar
from support.server import serving

from redivider.data import DataError, cifar, load

FORMS = [(kind, form, packed) for kind, form in FOLDERS for packed in (False, True)]


@pytest.mark.parametrize(("kind", "form", "packed"), FORMS)
@pytest.mark.parametrize("below", ["", "name"])
def test_every_form_is_read(kind, form, packed, below, tmp_path):
    _, true = write_cifar(tmp_path / (below and kind), kind, form, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    for train in (True, False):
        images: Any = load(kind, train=train, folder=tmp_path)
        pixels, labels = true["train" if train else "test"]
        assert torch.equal(images.pixels, pixels) and torch.equal(images.labels, labels)
        assert images.name == kind and images.num_classes == (10 if kind == "cifar10" else 100)
        assert (images.padding, images.flip) == (4, True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("protocol", range(5))
def test_python_files_of_every_protocol(protocol, tmp_path):
    _, true = write_cifar(tmp_path, "cifar100", "python", packed=False, protocol=protocol)
    images: Any = load("cifar100", train=True, folder=tmp_path)
    assert torch.equal(images.pixels, true["train"][0])
    assert torch.equal(images.labels, true["train"][1])


def test_50_steps(tmp_path):
    write_cifar(tmp_path, "cifar100", "binary", packed=True, num=40)
    batches = load("cifar100", train=True, folder=tmp_path).batches(16, train=True)
    for x, y in islice(batches.since(0), 50):
        assert x.shape == (16, 3, 32, 32) and x.isfinite().all() and int(y.max()) < 100


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("part", [0, 0.01, 0.3, 0.8, 0.999])
def test_an_archive_cut_short(form, part, tmp_path):
    path, _ = write_cifar(tmp_path, "cifar10", form, packed=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    refused(tmp_path, "is damaged or cut short|has no file", str(path), "delete .* or get https://")


def test_an_archive_with_wrong_bytes(tmp_path):
    """Also where only the checksum at the end can tell."""
    path, _ = write_cifar(tmp_path, "cifar10", "binary", packed=True)
    whole = path.read_bytes()
    # After the header, whose file name has no checksum.
    for place in range(40, len(whole), len(whole) // 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        refused(tmp_path, str(path))


def test_not_an_archive(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_text("<html>404</html>")
    refused(tmp_path, "cifar-10-binary.tar.gz is damaged or cut short")


def test_unpacked_files(tmp_path):
    files, _ = cifar_files("cifar10")
    binary = files["binary"]
    for number, (name, content, message) in enumerate(
        [
            ("data_batch_3.bin", None, "has no file data_batch_3.bin"),
            ("data_batch_3.bin", b"", "data_batch_3.bin has 0 bytes, not rows of 3,073"),
            ("data_batch_2.bin", binary["data_batch_2.bin"][:-1], "not rows of 3,073"),
            ("data_batch_2.bin", binary["data_batch_2.bin"][:-3073], "batches of different sizes"),
            ("data_batch_1.bin", b"\x0a" + binary["data_batch_1.bin"][1:], "more than 10 classes"),
        ]
    ):
        changed = {key: value for key, value in binary.items() if key != name}
        if content is not None:
            changed[name] = content
        folder = tmp_path / str(number)
        write_folder(folder / "cifar-10-batches-bin", changed)
        refused(folder, message, "delete .*cifar-10-batches-bin to download it again")


def test_members_that_are_not_files_are_passed_over(tmp_path):
    write_tar(tmp_path / "cifar-10-binary.tar.gz", {"readme.html": b"hello"})
    refused(tmp_path, "has no file data_batch_1.bin")


def test_it_is_downloaded_once(tmp_path, monkeypatch):
    path, true = write_cifar(tmp_path / "there", "cifar10", "binary", packed=True)
    content = path.read_bytes()
    known = dataclasses.replace(cifar.CIFAR10.forms[0], md5=hashlib.md5(content).hexdigest())
    monkeypatch.setattr(cifar, "CIFAR10", dataclasses.replace(cifar.CIFAR10, forms=(known,)))
    with serving({"/" + path.name: content}, monkeypatch) as (url, asked):
        monkeypatch.setattr(cifar, "SITE", url)
        for _ in range(2):
            images: Any = load("cifar10", train=True, folder=tmp_path / "here")
            assert torch.equal(images.pixels, true["train"][0])
        assert asked == ["/" + path.name]
    assert [file.name for file in (tmp_path / "here").iterdir()] == [path.name]


def test_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(cifar, "SITE", "http://127.0.0.1:9")
    for options in ({}, {"download": False}):
        refused(
            tmp_path / "here",
            "http://127.0.0.1:9/cifar-10-binary.tar.gz",
            f"put cifar-10-binary.tar.gz (into|there).*{tmp_path}|{tmp_path}.*put cifar-10-binary",
            "REDIVIDER_DATA",
            **options,
        )
    assert not list(tmp_path.rglob("*.gz*"))


def test_the_official_data():
    folder = os.environ.get("REDIVIDER_DATA")
    if not folder or not any(
        (Path(folder) / name).exists() for pair in list(FOLDERS.values())[:2] for name in pair
    ):
        pytest.skip("REDIVIDER_DATA names no folder with CIFAR-10")
    train: Any = load("cifar10", train=True, download=False)
    test: Any = load("cifar10", train=False, download=False)
    assert train.labels.bincount().tolist() == [5000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    mean = train.pixels.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor(train.mean).double(), rtol=0, atol=1e-4)
    # The first image of the training set is a frog, the first of the test a cat.
    assert (int(train.labels[0]), int(test.labels[0])) == (6, 3)
    md5 = hashlib.md5(train.pixels.numpy().tobytes()).hexdigest()
    assert md5 == "11af95666bd6fd7846144e768325bf13"
    x, _ = test.batches(2000, train=False)[0]
    assert abs(float(x.mean())) < 0.05 and 1.1 < float(x.std()) < 1.3


def refused(folder: Path, *messages: str, **options) -> None:
    """Check that loading fails with a one-line error that matches every message."""
    with pytest.raises(DataError) as caught:
        load("cifar10", train=True, folder=folder, **options)
    assert "\n" not in str(caught.value)
    for message in messages:
        caught.match(message)
