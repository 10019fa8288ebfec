"""Training on every data set: CIFAR-10 if it is available, the others from small archives."""

import os
from math import isfinite
from typing import get_args

import pytest
from support.archives import imagenet32_files, write_cifar, write_classes, write_zip
from support.training import REVNET, recipe, rows

from redivider.data import DataError, load
from redivider.train.loop import train
from redivider.train.recipe import Method

pytestmark = pytest.mark.slow


def has_cifar10():
    if not os.environ.get("REDIVIDER_DATA"):
        return False
    try:
        return len(load("cifar10", train=True, download=False)) == 50_000
    except DataError:
        return False


@pytest.mark.skipif(not has_cifar10(), reason="CIFAR-10 is not in $REDIVIDER_DATA")
@pytest.mark.parametrize("method", get_args(Method))
def test_300_steps_of_cifar10(method, tmp_path):
    steps = {"microbatch": 8, "epochs": 300 / 6250, "log_every": 100}
    config = recipe(data="cifar10", method=method, **steps, **REVNET)
    train(config, tmp_path / "run")
    lines = rows(tmp_path / "run")
    assert lines[-1]["step"] == 300
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("data", ["cifar100", "imagenet32", "imagenet"])
@pytest.mark.parametrize("method", ["reverse", "petra"])
def test_50_steps_of_the_others(data, method, tmp_path):
    options = {**recipe().model_options, "patch_size": 8}
    if data == "cifar100":
        num, _ = 64, write_cifar(tmp_path, data, "binary", packed=True, num=64)
    elif data == "imagenet32":
        num = 10 * 12
        for split, files in imagenet32_files(num=12)[0].items():
            write_zip(tmp_path / f"Imagenet32_{split}.zip", files)
    else:
        num = 12 + 9
        for part in ("train", "val"):
            write_classes(tmp_path / part, {"n01": 12, "n02": 9})
        options["image_size"] = 32
    config = recipe(
        data=data,
        data_folder=str(tmp_path),
        model_options=options,
        method=method,
        microbatch=8,
        epochs=50 / (num // 8),
        evaluate_every=100,
    )
    train(config, tmp_path / "run")
    lines = rows(tmp_path / "run")
    assert lines[-1]["step"] == 50
    assert all(isfinite(line["loss"]) for line in lines)
