"""States on disk: safetensors and a manifest in JSON, written beside and renamed.

A state is a tree of plain data and tensors. Its tensors go into one safetensors file for each unit
and each stage; the rest, with the place of every tensor and the SHA-256 of every file, into the
manifest. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redivider.pipeline.dense import order_of

MANIFEST = "manifest.json"


class StateError(ValueError):
    """A state is damaged, not ours, or does not fit; nothing was changed."""


def write_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Write a state; a folder that exists is replaced when the new one is complete."""
    folder = Path(folder)
    if folder.exists() and not (folder / MANIFEST).exists():
        raise StateError(f"{folder} exists and holds no state; choose another folder")
    with _beside(folder) as new:
        files: dict[str, dict[str, Tensor]] = {}
        tree = _encode(state, "pipeline", files)
        sums = {}
        for name, tensors in files.items():
            path = new / f"{name}.safetensors"
            # Tensors may share memory (a stream travels up and is kept); a file has each once.
            write_tensors(path, tensors)
            sums[path.name] = _sha256(path)
        text = json.dumps({"files": sums, "tree": tree}, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (new / MANIFEST).write_text(f"{digest}\n{text}")
        for path in (*new.iterdir(), new):  # on the disk before the name is: power may fail
            _sync(path)
    _sync(folder.parent)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; a full disk is an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({key: each.contiguous().clone() for key, each in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_state(folder: str | Path) -> dict[str, Any]:
    """Read a state back, whole and undamaged or not at all."""
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        digest, _, text = (folder / MANIFEST).read_text().partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{folder} holds no readable {MANIFEST}: {error}") from None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise StateError(f"{folder / MANIFEST} is damaged or cut short: its checksum is wrong")
    manifest = json.loads(text)
    files = {}
    for name, sha256 in manifest["files"].items():
        path = folder / name
        if not path.exists():
            raise StateError(f"{path} is missing")
        if _sha256(path) != sha256:
            raise StateError(f"{path} is damaged or cut short: its checksum is wrong")
        files[name.removesuffix(".safetensors")] = load_file(path)
    state: dict[str, Any] = _decode(manifest["tree"], files)
    return state


def _encode(value: Any, file: str, files: dict[str, dict[str, Tensor]]) -> Any:
    """JSON of a tree; what JSON has no word for becomes a list that begins with one."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors = files.setdefault(file, {})
            key = str(len(tensors))
            # A file has no strides: it has the dimensions in the order in which they lie.
            order = order_of(value)
            tensors[key] = value.detach().permute(order)
            return ["tensor", file, key, *order]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case tuple() | list():
            word = "tuple" if isinstance(value, tuple) else "list"
            return [word, *(_encode(each, _file(file, i), files) for i, each in enumerate(value))]
        case dict():
            pairs = value.items()
            return [
                "dict",
                *([_encode(k, file, files), _encode(v, _file(file, k), files)] for k, v in pairs),
            ]
    raise StateError(
        f"a state cannot hold a {type(value).__name__}; targets, side inputs and optimizer options "
        "must be numbers, strings, tensors, or lists, tuples and dictionaries of them"
    )


def _file(file: str, key: Any) -> str:
    """Units and stages have a file each; deeper levels stay in that of their unit or stage."""
    if file == "pipeline" and key in ("units", "stages"):
        return str(key)
    return f"{file[:-1]}-{key}" if file in ("units", "stages") else file


def _decode(value: Any, files: dict[str, dict[str, Tensor]]) -> Any:
    if not isinstance(value, list):
        return value
    word, *rest = value
    match word:
        case "tensor":
            file, key, *order = rest
            tensor = files[file][key]
            return tensor.permute([order.index(each) for each in range(len(order))])
        case "dtype":
            return getattr(torch, rest[0])
        case "tuple":
            return tuple(_decode(each, files) for each in rest)
        case "list":
            return [_decode(each, files) for each in rest]
        case "dict":
            return {_decode(k, files): _decode(v, files) for k, v in rest}
    raise StateError(f"the manifest holds an unknown word {word!r}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder beside this one, which takes its place at the end, or vanishes on an error."""
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
