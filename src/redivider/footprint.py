"""Memory that training a chain takes, measured and not computed, on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from redivider.errors import UnitError
from redivider.tree import tensors_of
from redivider.verify import restored


@dataclass(frozen=True)
class Memory:
    """Bytes that a pass through a chain allocates, beside its parameters and its input."""

    held: int
    """Between forward and backward, the output included."""
    peak: int
    """At most at any time, the gradients of the parameters included."""

    def __str__(self) -> str:
        return f"held {self.held / 1024:,.0f} KiB, peak {self.peak / 1024:,.0f} KiB"


def measure_memory(chain: nn.Module, x: Any, /, **side: Any) -> Memory:
    """Count the bytes that a forward and a backward allocate: measured, on any device."""
    given = (*chain.parameters(), *tensors_of((x, side)))
    wanted = [each for each in given if each.requires_grad]
    with restored(chain), torch.enable_grad(), Live() as live:
        output = chain(x, **side)
        held = live.bytes
        roots = [each.sum() for each in tensors_of(output) if each.requires_grad]
        if roots:
            torch.autograd.grad(roots, wanted, [*map(torch.ones_like, roots)], allow_unused=True)
        return Memory(held, live.peak)


def check_memory(
    build: Callable[[int], nn.Module],
    x: Any,
    /,
    *,
    depths: Sequence[int] = (8, 32),
    tolerance: float = 0.1,
    **side: Any,
) -> dict[int, Memory]:
    """Measure chains of several depths, and check that what they hold does not grow with depth.

    Args:
        build: Makes a chain of a given depth.
        x: Its input.
        depths: Two depths or more.
        tolerance: By how much the deepest may hold more than the shallowest, relative to that.
        **side: Its keywords.
    """
    if isinstance(build, nn.Module):
        raise TypeError("check_memory takes a function from a depth to a chain, not a chain")
    if len(set(depths)) < 2:
        raise ValueError(f"check_memory compares two depths or more, got {depths}")
    found = {depth: measure_memory(build(depth), x, **side) for depth in sorted(depths)}
    least, most = min(depths), max(depths)
    if found[most].held > (1 + tolerance) * found[least].held:
        table = "; ".join(f"depth {depth}: {memory}" for depth, memory in found.items())
        raise UnitError(f"the memory held between forward and backward grows with depth: {table}")
    return found


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that were made inside and are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):  # not seen yet: made outside
            self._remember(storage, 0)
        result = self._run(func, args, kwargs or {})
        for storage in _storages(result):
            self._remember(storage, storage.nbytes())
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _remember(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    parts = [part for each in tensors_of(tree) for part in _parts(each)]
    return [each.untyped_storage() for each in parts]


def _parts(tensor: Tensor) -> list[Tensor]:
    """What holds the numbers of a tensor: a sparse one is made of others."""
    if tensor.layout != torch.sparse_coo:
        return [tensor]
    return [tensor._indices(), tensor._values()]
