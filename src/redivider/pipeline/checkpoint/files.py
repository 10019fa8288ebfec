"""Files of a saved state: safetensors and a manifest in JSON. Nothing is ever unpickled.

A state is a tree of plain data and tensors. Its tensors go into one safetensors file per unit and
per stage. The rest goes into the manifest, with the place of every tensor and the SHA-256 of every
file:

    folder/
        manifest.json                checksum of the manifest, files, tree
        stage-0.safetensors  ...     messages, optimizer state
        unit-0.safetensors   ...     weights, gradients, kept inputs

A state is written to a new folder beside the old one, which is then renamed, so that a crash leaves
one of the two. Several processes may write their parts of a state: all fill one folder, and the
first of them writes the manifest.
"""

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch
from torch import Tensor

from redivider.errors import StateError as StateError
from redivider.errors import require
from redivider.strides import inverse, memory_order

MANIFEST = "manifest.json"


class Writers(Protocol):
    """Processes that write one state together."""

    is_first: bool

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all processes, in the order of ranks."""

    def note_agreed(self, error: Exception) -> None:
        """Note an error that all processes raise alike, and after which they may continue."""


class Alone:
    """Single process that writes a whole state."""

    is_first = True

    def gather_text(self, text: str) -> list[str]:
        return [text]

    def note_agreed(self, error: Exception) -> None:
        pass


def write_state(folder: str | Path, state: dict[str, Any], writers: Writers | None = None) -> None:
    """Write a state; replace an existing folder only when the new one is complete.

    Args:
        folder: Target folder, on a disk that all writers share.
        state: The whole state, or this process's part.
        writers: Processes that write parts of it; all of them call this function.
    """
    _require_safetensors()  # before anything is written
    # Links are resolved: the rename must replace the folder itself, and not a link to it.
    folder, writers = Path(folder).resolve(), writers or Alone()
    try:
        # All use the process id of the first writer, even on other machines.
        pid = all_or_none(writers, lambda: _make_new(folder) if writers.is_first else None)[0]
        new = _beside(folder, "new", pid)
        parts = all_or_none(writers, lambda: _write_part(new, state))
        all_or_none(writers, lambda: _finish(folder, new, parts) if writers.is_first else None)
    except BaseException:
        if writers.is_first:
            shutil.rmtree(_beside(folder, "new", os.getpid()), ignore_errors=True)
        raise


def all_or_none(writers: Writers, action: Callable[[], Any]) -> list[Any]:
    """Run an action in every process; return the results of all, or raise in all of them."""
    error: Exception | None = None
    try:
        text = json.dumps(["done", action()])
    except (OSError, StateError) as raised:
        error, text = raised, json.dumps([type(raised).__name__, str(raised)])
    outcomes = [json.loads(outcome) for outcome in writers.gather_text(text)]
    for rank, (kind, result) in enumerate(outcomes):
        if kind != "done" and error is None:
            error = (StateError if kind == "StateError" else OSError)(f"rank {rank}: {result}")
    if error is not None:
        writers.note_agreed(error)
        raise error
    return [result for _, result in outcomes]


def _make_new(folder: Path) -> int:
    """Make the folder in which a new state is written; return the process id in its name."""
    if folder.exists() and not (folder / MANIFEST).exists():
        raise StateError(f"{folder} exists and holds no state; choose another folder")
    new = _beside(folder, "new", os.getpid())
    shutil.rmtree(new, ignore_errors=True)  # left by a killed process with the same id
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise type(error)(error.errno, f"cannot make it ({error.strerror})", str(folder)) from None
    return os.getpid()


def _write_part(new: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Write the tensors of one process; return its part of the manifest."""
    files: dict[str, dict[str, Tensor]] = {}
    tree = _encode(state, (), files)
    sums = {}
    for name, tensors in files.items():
        path = new / f"{name}.safetensors"
        write_tensors(path, tensors)
        sums[path.name] = _sha256(path)
        _sync(path)
    return {"files": sums, "tree": tree}


def _finish(folder: Path, new: Path, parts: list[dict[str, Any]]) -> None:
    """Write the manifest of all parts, and move the new folder to its place."""
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
    for path in (new / MANIFEST, new):  # on disk before the rename, in case the power fails
        _sync(path)
    old = _beside(folder, "old", os.getpid())
    shutil.rmtree(old, ignore_errors=True)  # left by a killed process with the same id
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    _sync(folder.parent)


def _merge(one: Any, other: Any) -> Any:
    """Merge two encoded trees: what is in both must be a dictionary, or equal."""
    if not (isinstance(one, list) and isinstance(other, list) and one[0] == other[0] == "dict"):
        if one != other:
            raise StateError(f"processes have written different states: {one} and {other}")
        return one
    pairs = {json.dumps(key): [key, value] for key, value in one[1:]}
    for key, value in other[1:]:
        pair = pairs.setdefault(json.dumps(key), [key, value])
        if pair[1] is not value:
            pair[1] = _merge(pair[1], value)
    return ["dict", *pairs.values()]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; raise OSError if the disk is full."""
    safetensors = _require_safetensors()
    # Tensors may share memory, which safetensors refuses: a stream is sent and kept. So clone them.
    clones = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(clones, path)
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
    """Read a state; raise `StateError` if it is damaged or not complete.

    Args:
        folder: Folder of the state.
        wanted: Returns whether to read what lies under a path of keys; other files stay closed.
        readers: Processes that read their parts of it; if one of them fails, all fail.
    """
    _require_safetensors()
    states: list[dict[str, Any]] = []
    all_or_none(readers or Alone(), lambda: states.append(_read_part(Path(folder), wanted)))
    return states[0]


def _read_part(folder: Path, wanted: Callable[[tuple[Any, ...]], bool]) -> dict[str, Any]:
    load_file = _require_safetensors().torch.load_file
    try:
        digest, _, text = (folder / MANIFEST).read_text().partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{folder} holds no readable {MANIFEST}: {error}") from None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise StateError(f"{folder / MANIFEST} is damaged or cut short: its checksum is wrong")
    manifest = json.loads(text)

    @cache
    def load(name: str) -> dict[str, Tensor]:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            raise StateError(f"{path} is missing")
        if _sha256(path) != manifest["files"][path.name]:
            raise StateError(f"{path} is damaged or cut short: its checksum is wrong")
        tensors: dict[str, Tensor] = load_file(path)
        return tensors

    state: dict[str, Any] = _decode(_prune(manifest["tree"], (), wanted), load)
    return state


def _prune(tree: Any, path: tuple[Any, ...], wanted: Callable[[tuple[Any, ...]], bool]) -> Any:
    """Return an encoded tree without the entries that are not wanted."""
    if not (isinstance(tree, list) and tree[0] == "dict"):
        return tree
    pairs = ((key, value, (*path, _decode(key))) for key, value in tree[1:])
    return ["dict", *([key, _prune(v, keys, wanted)] for key, v, keys in pairs if wanted(keys))]


def _encode(value: Any, path: tuple[Any, ...], files: dict[str, dict[str, Tensor]]) -> Any:
    """Encode a tree as JSON, and collect its tensors by file.

    A value that JSON does not have becomes a list that begins with its kind, such as "tuple".
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            file = _file(path)
            tensors = files.setdefault(file, {})
            key = str(len(tensors))
            # A file has no strides: write the dimensions in the order of memory, and note it.
            order = memory_order(value)
            if value.dtype == torch.complex128:
                raise StateError(
                    "a state cannot hold tensors of complex128, which safetensors files do not "
                    "support; give them as real tensors (torch.view_as_real)"
                )
            tensors[key] = value.detach().permute(order)
            return ["tensor", file, key, *order]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case tuple() | list() if not hasattr(value, "_fields"):  # a namedtuple would lose its names
            kind = "tuple" if isinstance(value, tuple) else "list"
            return [kind, *(_encode(item, (*path, i), files) for i, item in enumerate(value))]
        case dict() if type(value) in (dict, OrderedDict):  # other kinds would be read as a dict
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
    """Return the file of a tensor: one for each unit, each stage, and each other key at the top."""
    keys, prefix = [str(key) for key in path], ""
    if keys[0] == "engine":  # the state of a whole run holds that of its pipeline under this key
        keys = keys[1:]
    if keys[0] == "columns":
        prefix, keys = f"column-{keys[1]}-", keys[2:]
    if keys[0] in ("units", "stages", "seen") and len(keys) > 1:
        return f"{prefix}{keys[0].removesuffix('s')}-{quote(keys[1], safe='')}"
    return prefix + keys[0]


def _decode(value: Any, load: Callable[[str], dict[str, Tensor]] | None = None) -> Any:
    """Return the tree that `_encode` encoded; `load` reads the tensors of a file."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    match kind:
        case "tensor":
            file, key, *order = rest
            assert load is not None, "keys hold no tensors"
            tensor = load(file)[key]
            return tensor.permute(inverse(order))
        case "dtype":
            return getattr(torch, rest[0])
        case "tuple":
            return tuple(_decode(item, load) for item in rest)
        case "list":
            return [_decode(item, load) for item in rest]
        case "dict":
            return {_decode(k, load): _decode(v, load) for k, v in rest}
    raise StateError(f"the manifest holds an unknown word {kind!r}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(folder: Path, role: str, pid: int) -> Path:
    """Return the path beside a folder where the new one is written, or the old one moved to."""
    return folder.with_name(f".{folder.name}.{role}-{pid}")
