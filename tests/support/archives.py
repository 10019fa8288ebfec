"""Small data sets in the official layouts: folders, archives, class folders."""

import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def make_rows(num: int, num_classes: int, *, seed: int):
    """Return random images (num, 3072) and labels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (num, 3072), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(num_classes, (num,), generator=generator)


def cifar_files(kind: str, *, num: int = 8, protocol: int = 2):
    """Return the files of CIFAR-10 or CIFAR-100 by form and name, true images and true labels."""
    batches = (
        {**{f"data_batch_{i}": "train" for i in range(1, 6)}, "test_batch": "test"}
        if kind == "cifar10"
        else {"train": "train", "test": "test"}
    )
    binary: dict[str, bytes] = {}
    python: dict[str, bytes] = {}
    true: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "test": []}
    for seed, (name, split) in enumerate(batches.items()):
        pixels, labels = make_rows(num, 10 if kind == "cifar10" else 100, seed=seed)
        true[split].append((pixels.view(-1, 3, 32, 32), labels))
        coarse = [] if kind == "cifar10" else [labels.byte()[:, None] // 5]
        rows = torch.cat([*coarse, labels.byte()[:, None], pixels], 1)
        binary[f"{name}.bin"] = rows.numpy().tobytes()
        key = "labels" if kind == "cifar10" else "fine_labels"
        content = {"batch_label": name, key: labels.tolist(), "data": pixels.numpy()}
        if coarse:
            content["coarse_labels"] = coarse[0].flatten().tolist()
        python[name] = pickle.dumps(content, protocol)
    whole = {
        split: tuple(map(torch.cat, zip(*parts, strict=True))) for split, parts in true.items()
    }
    return {"binary": binary, "python": python}, whole


FOLDERS = {
    ("cifar10", "binary"): ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ("cifar10", "python"): ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ("cifar100", "binary"): ("cifar-100-binary", "cifar-100-binary.tar.gz"),
    ("cifar100", "python"): ("cifar-100-python", "cifar-100-python.tar.gz"),
}


def write_cifar(folder: Path, kind: str, form: str, *, packed: bool, **options):
    """Write CIFAR in one official form; return its path, and the true images and labels."""
    files, true = cifar_files(kind, **options)
    name, archive = FOLDERS[kind, form]
    if not packed:
        write_folder(folder / name, files[form])
        return folder / name, true
    write_tar(folder / archive, {f"{name}/{key}": value for key, value in files[form].items()})
    return folder / archive, true


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def imagenet32_files(*, num: int = 6):
    """Return the files of ImageNet32 by split and name, and the true images and labels."""
    names = {"train": [f"train_data_batch_{i}" for i in range(1, 11)], "val": ["val_data"]}
    files: dict[str, dict[str, bytes]] = {}
    true: dict[str, tuple[Tensor, ...]] = {}
    for split, batches in names.items():
        parts = [make_rows(num, 1000, seed=seed) for seed in range(len(batches))]
        true[split] = tuple(map(torch.cat, zip(*parts, strict=True)))
        files[split] = {}
        for name, (pixels, labels) in zip(batches, parts, strict=True):
            content = {"data": pixels.numpy(), "labels": (labels + 1).tolist()}
            if split == "train":
                content["mean"] = pixels.double().mean(0).numpy()
            files[split][name] = pickle.dumps(content, 4)
    return files, true


def write_classes(folder: Path, classes: dict[str, int], *, seed: int = 0, suffix: str = ".JPEG"):
    """Write random smooth images of several shapes into class folders."""
    generator = torch.Generator().manual_seed(seed)
    for name, num in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(num):
            small = torch.randint(256, (6, 9, 3), dtype=torch.uint8, generator=generator)
            image = Image.fromarray(small.numpy()).resize((60 + 7 * i, 48 + 11 * (i % 3)))
            image.save(folder / name / f"{name}_{i}{suffix}", "JPEG", quality=90)
