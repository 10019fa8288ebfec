"""What a module is made of, found in one walk: its modules, and where its parameters hang.

FSDP2 swaps parameters while a module runs, so places are kept, and not only the tensors in them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Place = tuple[dict[str, Any], str]


class Anatomy:
    """The modules within one, itself first, and its parameters, each once."""

    def __init__(self, module: nn.Module) -> None:
        places: dict[Tensor, list[Place]] = {}  # tied weights hang in several
        found = {module: None}  # a dictionary, because it keeps its order
        queue = [module]
        while queue:
            each = queue.pop()
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((each._parameters, name))
            for child in each._modules.values():
                if child is not None and child not in found:
                    found[child] = None
                    queue.append(child)
        self.modules = tuple(found)
        self.parameters = list(places)
        self._places = list(places.values())

    @contextmanager
    def substituted(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Hang other tensors in the parameters' places, then the ones that were there again."""
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
