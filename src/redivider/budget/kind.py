"""Kinds of modules: those of one kind take as many bytes and as much time.

Modules are of one kind if nothing differs but the values of their weights. What cannot be compared
differs, so that a module may be measured for nothing, but never by the numbers of another one.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from redivider._torch_private import compiled_call
from redivider.convert.reversible import PLACE, PLAIN

# Attributes of every module that are compared in another way, or have no effect on a call.
IGNORED = ("_parameters", "_buffers", "_modules", PLACE, PLAIN)


def kind_of_module(module: nn.Module) -> Any:
    """Return a key that modules share if they differ only in the values of their weights."""
    modules = list(module.named_modules(remove_duplicate=False))
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return (
        tuple((name, *_settings(own)) for name, own in modules),
        tuple((name, describe(tensor)) for name, tensor in tensors),
        _places(own for _, own in modules),
        _places(tensor for _, tensor in tensors),
    )


def describe(tree: Any) -> Any:
    """Return a key that trees share if they differ only in the values of their tensors."""
    leaves, spec = tree_flatten(tree)
    return str(spec), tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.stride(), leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in leaves
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the class of a module, its compiled call, and its plain attributes with hooks."""
    # The index of a layer of transformers is that of its cache.
    is_transformers = type(module).__module__.startswith("transformers.")
    ignored = (*IGNORED, *(("layer_idx",) if is_transformers else ()))
    compiled = compiled_call(module)
    attributes = tuple(
        (name, _comparable(value))
        for name, value in vars(module).items()
        if name not in ignored and "state_dict" not in name
        if compiled is None or value is not compiled
    )
    return type(module), getattr(compiled, "function", compiled), attributes


def _comparable(value: Any) -> Any:
    """Return a key of an attribute: its value if that can be compared, else its identity."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, dict):
        return type(value), tuple((_comparable(k), _comparable(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, set):
        return type(value), frozenset(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _places(items: Iterable[Any]) -> tuple[int, ...]:
    """Return for every item the place of the first one that is the same object."""
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(item), place) for place, item in enumerate(items))
