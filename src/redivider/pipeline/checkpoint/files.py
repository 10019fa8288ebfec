"""States on disk: safetensors and a manifest in JSON, written beside and renamed.

A state is a tree of plain data and tensors. Its tensors go into one safetensors file for each unit
and each stage; the rest, with the place of every tensor and the SHA-256 of every file, into the
manifest. Nothing is ever unpickled. Several processes may each write a part of a state: they fill
one folder, and the first of them writes the manifest.
"""

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch
from torch import Tensor

from redivider.errors import require
from redivider.pipeline.stages.layout import order_of

MANIFEST = "manifest.json"


class StateError(ValueError):
    """A state is damaged, not ours, or does not fit; nothing was changed."""


class Writers(Protocol):
    """The processes that write one state together."""

    is_first: bool

    def tell_all(self, text: str) -> list[str]:
        """Give a text to all, and get everybody's, in one order."""


class Alone:
    """One process."""

    is_first = True

    def tell_all(self, text: str) -> list[str]:
        return [text]


def write_state(folder: str | Path, state: dict[str, Any], writers: Writers | None = None) -> None:
    """Write a state; a folder that exists is replaced when the new one is complete.

    Args:
        folder: Where to; on a disk that all writers share.
        state: All of it, or this process's part.
        writers: Those who write with it; each calls this.
    """
    _require_safetensors()  # before anything is written
    folder, writers = Path(folder).resolve(), writers or Alone()  # through links
    try:
        # The first one's number, since there may be several machines.
        number = all_well(writers, lambda: _make_new(folder) if writers.is_first else None)[0]
        new = _beside(folder, "new", number)
        parts = all_well(writers, lambda: _write_part(new, state))
        all_well(writers, lambda: _finish(folder, new, parts) if writers.is_first else None)
    except BaseException:
        if writers.is_first:
            shutil.rmtree(_beside(folder, "new", os.getpid()), ignore_errors=True)
        raise


def all_well(writers: Writers, do: Callable[[], Any]) -> list[Any]:
    """Do something in every process, and go on in all of them or in none; what each has found.

    An error that comes of it is everybody's: `is_agreed`.
    """
    error: Exception | None = None
    try:
        text = json.dumps(["done", do()])
    except (OSError, StateError) as raised:
        error, text = raised, json.dumps([type(raised).__name__, str(raised)])
    found = [json.loads(each) for each in writers.tell_all(text)]
    for rank, (kind, said) in enumerate(found):
        if kind != "done" and error is None:
            error = (StateError if kind == "StateError" else OSError)(f"rank {rank}: {said}")
    if error is not None:
        error.is_agreed = True  # type: ignore[attr-defined]
        raise error
    return [said for _, said in found]


def _make_new(folder: Path) -> int:
    if folder.exists() and not (folder / MANIFEST).exists():
        raise StateError(f"{folder} exists and holds no state; choose another folder")
    new = _beside(folder, "new", os.getpid())
    shutil.rmtree(new, ignore_errors=True)  # of a process with this number that was killed
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise type(error)(error.errno, f"cannot make it ({error.strerror})", str(folder)) from None
    return os.getpid()


def _write_part(new: Path, state: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, dict[str, Tensor]] = {}
    tree = _encode(state, (), files)
    sums = {}
    for name, tensors in files.items():
        path = new / f"{name}.safetensors"
        # Tensors may share memory (a stream travels up and is kept); a file has each once.
        write_tensors(path, tensors)
        sums[path.name] = _sha256(path)
        _sync(path)
    return {"files": sums, "tree": tree}


def _finish(folder: Path, new: Path, parts: list[dict[str, Any]]) -> None:
    """Write the manifest of all parts, and put the folder in its place."""
    merged: dict[str, Any] = {"files": {}, "tree": ["dict"]}
    for part in parts:
        twice = merged["files"].keys() & part["files"].keys()
        if twice:
            raise StateError(f"two processes have written {', '.join(sorted(twice))}")
        merged["files"] |= part["files"]
        merged["tree"] = _merge(merged["tree"], part["tree"])
    text = json.dumps(merged, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (new / MANIFEST).write_text(f"{digest}\n{text}")
    for path in (new / MANIFEST, new):  # on the disk before the name is: power may fail
        _sync(path)
    old = _beside(folder, "old", os.getpid())
    shutil.rmtree(old, ignore_errors=True)  # of a process with this number that was killed
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    _sync(folder.parent)


def _merge(one: Any, other: Any) -> Any:
    """Two encoded trees in one: what is in both must be a dictionary, or the same."""
    if not (isinstance(one, list) and isinstance(other, list) and one[0] == other[0] == "dict"):
        if one != other:
            raise StateError(f"processes have written different states: {one} and {other}")
        return one
    found = {json.dumps(key): [key, value] for key, value in one[1:]}
    for key, value in other[1:]:
        mine = found.setdefault(json.dumps(key), [key, value])
        if mine[1] is not value:
            mine[1] = _merge(mine[1], value)
    return ["dict", *found.values()]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; a full disk is an OSError."""
    safetensors = _require_safetensors()
    try:
        safetensors.torch.save_file(
            {key: each.contiguous().clone() for key, each in tensors.items()}, path
        )
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def _require_safetensors() -> Any:
    purpose = "a state on disk"
    require("safetensors.torch", purpose, "checkpoint")
    return require("safetensors", purpose, "checkpoint")


def read_state(
    folder: str | Path,
    wanted: Callable[[tuple[Any, ...]], bool] = lambda path: True,
    readers: Writers | None = None,
) -> dict[str, Any]:
    """Read a state back, whole and undamaged or not at all.

    Args:
        folder: Where it is.
        wanted: Whether what lies under these keys is to be read; files of others are left alone.
        readers: Those who read their parts with it; if one of them cannot, none does.
    """
    _require_safetensors()
    found: list[dict[str, Any]] = []
    all_well(readers or Alone(), lambda: found.append(_read_part(Path(folder), wanted)))
    return found[0]


def _read_part(folder: Path, wanted: Callable[[tuple[Any, ...]], bool]) -> dict[str, Any]:
    load_file = _require_safetensors().torch.load_file
    try:
        digest, _, text = (folder / MANIFEST).read_text().partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{folder} holds no readable {MANIFEST}: {error}") from None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise StateError(f"{folder / MANIFEST} is damaged or cut short: its checksum is wrong")
    manifest = json.loads(text)
    tree = _prune(manifest["tree"], (), wanted)
    files = {}
    for name in sorted(set(_files(tree))):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            raise StateError(f"{path} is missing")
        if _sha256(path) != manifest["files"][path.name]:
            raise StateError(f"{path} is damaged or cut short: its checksum is wrong")
        files[name] = load_file(path)
    state: dict[str, Any] = _decode(tree, files)
    return state


def _prune(tree: Any, path: tuple[Any, ...], wanted: Callable[[tuple[Any, ...]], bool]) -> Any:
    if not (isinstance(tree, list) and tree[0] == "dict"):
        return tree
    pairs = ((key, value, (*path, _decode(key, {}))) for key, value in tree[1:])
    return ["dict", *([key, _prune(v, keys, wanted)] for key, v, keys in pairs if wanted(keys))]


def _files(tree: Any) -> Iterator[str]:
    """The files of the tensors in an encoded tree."""
    if isinstance(tree, list):
        if tree[0] == "tensor":
            yield tree[1]
        else:
            for each in tree[1:]:
                for part in each if tree[0] == "dict" else [each]:
                    yield from _files(part)


def _encode(value: Any, path: tuple[Any, ...], files: dict[str, dict[str, Tensor]]) -> Any:
    """JSON of a tree; what JSON has no word for becomes a list that begins with one."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            file = _file(path)
            tensors = files.setdefault(file, {})
            key = str(len(tensors))
            # A file has no strides: it has the dimensions in the order in which they lie.
            order = order_of(value)
            if value.dtype == torch.complex128:
                raise StateError("a state cannot hold tensors of complex128, which files have not")
            tensors[key] = value.detach().permute(order)
            return ["tensor", file, key, *order]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case tuple() | list() if not hasattr(value, "_fields"):  # whose names would be lost
            word = "tuple" if isinstance(value, tuple) else "list"
            return [word, *(_encode(each, (*path, i), files) for i, each in enumerate(value))]
        case dict() if type(value) in (dict, OrderedDict):  # others would come back as these
            return [
                "dict",
                *([_encode(k, (), {}), _encode(v, (*path, k), files)] for k, v in value.items()),
            ]
    raise StateError(
        f"a state cannot hold a {type(value).__name__}; targets, side inputs and optimizer options "
        "must be numbers, strings, tensors, or lists, tuples and dictionaries of them; inputs and "
        "targets are only in it while they are in flight, and flush() ends that"
    )


def _file(path: tuple[Any, ...]) -> str:
    """Units and stages have a file each, and so has whatever else stands at the top."""
    keys, prefix = [str(key) for key in path], ""
    if keys[0] == "engine":  # of a run, which saves more than a pipeline's state
        keys = keys[1:]
    if keys[0] == "columns":
        prefix, keys = f"column-{keys[1]}-", keys[2:]
    if keys[0] in ("units", "stages", "seen") and len(keys) > 1:
        return f"{prefix}{keys[0].removesuffix('s')}-{quote(keys[1], safe='')}"
    return prefix + keys[0]


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


def _beside(folder: Path, what: str, number: int) -> Path:
    """Where a new folder is made ready, and where an old one goes, beside this one."""
    return folder.with_name(f".{folder.name}.{what}-{number}")
