"""Data by name: where files are searched, and errors for wrong names and options."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import write_cifar

from redivider.data import DataError, list_data, load
from redivider.data.files import data_folder


def test_names():
    assert list_data() == ["digits", "cifar10", "cifar100", "imagenet32", "imagenet", "text"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("cifra10", "cifar10"), ("CIFAR100", "cifar100"), ("imagenet-32", "imagenet32")],
)
def test_unknown_names_get_the_nearest(name, near):
    with pytest.raises(DataError, match=f"there is no data '{name}'; did you mean '{near}'"):
        load(name, train=True)


def test_unknown_names_and_options():
    for name in ("mnist-like", "", None, 3):
        with pytest.raises(DataError, match="one of digits, cifar10, cifar100, imagenet32"):
            load(name, train=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cifar10 has no option 'downlaod'; did you mean 'downl"):
        load("cifar10", train=True, downlaod=False)
    with pytest.raises(DataError, match="digits has no option 'tokens'; it has none"):
        load("digits", train=True, tokens=3)
    with pytest.raises(DataError, match="imagenet has no option 'xyz'; it has one of image_size"):
        load("imagenet", train=True, xyz=3)


def test_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIVIDER_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "redivider"
    assert data_folder("~/x") == tmp_path / "x"
    monkeypatch.setenv("REDIVIDER_DATA", "")
    assert data_folder() == tmp_path / ".cache" / "redivider"
    monkeypatch.setenv("REDIVIDER_DATA", str(tmp_path / "data"))
    assert data_folder() == tmp_path / "data"
    assert data_folder("other") == Path("other")
    _, true = write_cifar(tmp_path / "data", "cifar10", "binary", packed=False)
    images: Any = load("cifar10", train=True, download=False)
    assert torch.equal(images.pixels, true["train"][0])


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("digits", "sklearn", "scikit-learn"),
        ("text", "tokenizers", "tokenizers"),
        ("cifar10", "tqdm", "tqdm"),
    ],
)
def test_missing_packages(name, module, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "input.txt").write_text("some text")
    options = {"tokens": 300} if name == "text" else {}
    with pytest.raises(DataError, match=f"needs {package}; pip install"):
        load(name, train=True, folder=tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["input.txt"]
