"""Memory that training a chain takes, measured on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from redivider._torch_private import TorchDispatchMode
from redivider.checks.restore import restored
from redivider.errors import UnitError
from redivider.tree import tensors_of


@dataclass(frozen=True)
class Memory:
    """Bytes that a pass through a chain allocates, besides its parameters and its input."""

    held: int
    """Bytes held between forward and backward, including the output."""
    peak: int
    """Largest number of bytes at any time, including the gradients of the parameters."""

    def __str__(self) -> str:
        return f"held {self.held / 1024:,.0f} KiB, peak {self.peak / 1024:,.0f} KiB"


def measure_memory(chain: nn.Module, x: Any, /, **side: Any) -> Memory:
    """Run a forward and a backward, and count the bytes that they allocate."""
    inputs = (*chain.parameters(), *tensors_of((x, side)))
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    with restored(chain), torch.enable_grad(), Live() as live:
        output = chain(x, **side)
        held = live.bytes
        roots = [tensor.sum() for tensor in tensors_of(output) if tensor.requires_grad]
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
        build: A function from a depth to a chain.
        x: The input of the chains.
        depths: Two depths or more.
        tolerance: Relative amount by which the deepest may hold more than the shallowest.
        **side: The keywords of the chains.
    """
    if isinstance(build, nn.Module):
        raise TypeError("check_memory takes a function from a depth to a chain, not a chain")
    if len(set(depths)) < 2:
        raise ValueError(f"check_memory compares two depths or more, got {depths}")
    memories = {depth: measure_memory(build(depth), x, **side) for depth in sorted(depths)}
    least, most = min(depths), max(depths)
    if memories[most].held > (1 + tolerance) * memories[least].held:
        table = "; ".join(f"depth {depth}: {memory}" for depth, memory in memories.items())
        raise UnitError(f"the memory held between forward and backward grows with depth: {table}")
    return memories


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of live storages that were allocated inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):  # if unknown, allocated outside: counts 0
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
    parts = [part for tensor in tensors_of(tree) for part in _parts(tensor)]
    return [part.untyped_storage() for part in parts]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold the numbers of a tensor: two for a sparse one."""
    if tensor.layout != torch.sparse_coo:
        return [tensor]
    return [tensor._indices(), tensor._values()]
