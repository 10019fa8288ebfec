"""Weights of a model from a state dict: its own, or that of the same network in another library."""

import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redivider.chain import Chain
from redivider.errors import require
from redivider.models.options import OptionError
from redivider.models.weight_names import Derived, Names, Source

Weights = Mapping[str, Tensor] | str | PathLike[str]
NUM_LISTED = 3


def load_weights(
    model: Chain, weights: Weights, *, name: str, names: Names | None, options: Any
) -> None:
    """Load a state dict, or a file of one, into a model; raise one error if it does not fit.

    Args:
        model: The model.
        weights: A state dict, or the path of one.
        name: Name of the model, for errors.
        names: Names of the weights in other libraries, if there is such a network.
        options: Options of the model.
    """
    theirs = _read(weights)
    prefixes = () if names is None else names.prefixes
    stripped = {_strip(key, prefixes): key for key in theirs}
    ours, state, known = model.state_dict(), dict[str, Tensor](), set[str]()
    missing, unlike = list[str](), list[str]()
    for key, tensor in ours.items():
        sources = [*_sources(key, names, options), Derived(_same, (key,))]
        known.update(part for source in sources for part in source.names)
        source = next((s for s in sources if all(part in stripped for part in s.names)), None)
        if source is not None:
            value = source.function(*(theirs[stripped[part]] for part in source.names))
            if _essential(value) == _essential(tensor):
                state[key] = value.reshape(tensor.shape)
            else:
                unlike.append(f"{key} is {tuple(tensor.shape)}, and {tuple(value.shape)} there")
        elif names is not None and key.endswith(names.zero):
            state[key] = torch.zeros_like(tensor)
        else:
            missing.append(key)
    ignored = () if names is None else names.ignored
    unknown = [
        key
        for part, key in stripped.items()
        if part not in known and not any(text in f".{part}" for text in ignored)
    ]
    faults = [*_list("missing", missing), *_list("unknown", unknown)]
    faults += [*_list("of another shape", unlike), *_list("not tied", _untied(ours, state))]
    if faults:
        others = "its own" if names is None else f"its own, and those of {names.libraries}"
        raise OptionError(
            f"the weights do not fit {name} with these options: {'; '.join(faults)}. It takes "
            f"state dicts of the whole model with its head: {others}"
        )
    model.load_state_dict(state)


def _read(weights: Weights) -> Mapping[str, Tensor]:
    """Return a state dict; read it if it is a path."""
    state: Any = weights
    if isinstance(weights, str | PathLike):
        path = Path(weights)
        if not path.is_file():
            raise OptionError(f"there is no file {path} to read weights from")
        if path.suffix == ".safetensors":
            safetensors = require("safetensors.torch", f"reading {path.name}", "checkpoint")
            state = safetensors.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    kind = type(state).__name__
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        wrong = [key for key, value in state.items() if not isinstance(value, Tensor)]
        if not wrong:
            return state
        kind = f"an entry {wrong[0]!r} that is not a tensor"
    raise OptionError(
        f"weights must be a state dict, or the path of one (.pt or .safetensors), got {kind}"
    )


def _strip(key: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        key = key.removeprefix(prefix)
    return key


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _sources(key: str, names: Names | None, options: Any) -> Iterator[Derived]:
    """Yield the sources of a tensor of ours, with the words in their names filled in."""
    for template, sources in (names.table if names else {}).items():
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[a-z0-9]+)", re.escape(template))
        match = re.fullmatch(rf"{pattern}(?P<_end>(\.\w+)?)", key)
        if match is None:
            continue
        assert names is not None
        words = match.groupdict()
        end = words.pop("_end")
        places = names.places(options, words)
        for source in sources:
            yield _fill(source, places, end)


def _fill(source: Source, places: Mapping[str, Any], end: str) -> Derived:
    derived = source if isinstance(source, Derived) else Derived(_same, (source,))
    return Derived(derived.function, tuple(name.format(**places) + end for name in derived.names))


def _essential(tensor: Tensor) -> list[int]:
    """Return the shape without dimensions of one."""
    return [num for num in tensor.shape if num != 1]


def _untied(ours: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are one tensor here, and two different ones there."""
    first: dict[Any, str] = {}
    untied = []
    for key in state:
        owner = first.setdefault((ours[key].data_ptr(), ours[key].shape), key)
        if owner != key and ours[key].numel() and not torch.equal(state[owner], state[key]):
            untied.append(f"{owner} and {key} (pass tied=False)")
    return untied


def _list(fault: str, names: list[str]) -> list[str]:
    """Return a phrase about names that have a fault; none if there are none."""
    more = [f"{len(names) - NUM_LISTED} more"] if len(names) > NUM_LISTED else []
    return [f"{fault}: {', '.join(names[:NUM_LISTED] + more)}"] if names else []
