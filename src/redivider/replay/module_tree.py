"""Modules and parameters of a module, collected in one walk.

FSDP2 swaps parameters while a module runs, so the places of the parameters are kept too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Place = tuple[dict[str, Any], str]  # a module's dictionary of parameters, and a key


class ModuleTree:
    """A module with all modules inside it, itself first, and its parameters without repeats."""

    def __init__(self, module: nn.Module) -> None:
        places: dict[Tensor, list[Place]] = {}  # tied weights have several
        modules = {module: None}  # a dictionary, because it keeps its order
        queue = [module]
        while queue:
            current = queue.pop()
            for name, parameter in current._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((current._parameters, name))
            for child in current._modules.values():
                if child is not None and child not in modules:
                    modules[child] = None
                    queue.append(child)
        self.modules = tuple(modules)
        self.parameters = list(places)
        self._places = list(places.values())

    @contextmanager
    def substituted(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Replace the parameters by other tensors inside, and restore them afterwards."""
        swaps = [
            (holder, name, holder[name], stand_in)
            for places, stand_in in zip(self._places, stand_ins, strict=True)
            for holder, name in places
        ]
        for holder, name, _, stand_in in swaps:
            holder[name] = stand_in
        try:
            yield
        finally:
            for holder, name, original, _ in swaps:
                holder[name] = original
