"""Memory that training takes, measured on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, overload
from weakref import finalize

import torch
from torch import Tensor, nn

from redivider._torch_private import TorchDispatchMode
from redivider.chain import Chain
from redivider.checks.report import format_table
from redivider.checks.restore import restored, running_by
from redivider.errors import UnitError
from redivider.tree import tensors_of

if TYPE_CHECKING:
    from redivider.pipeline.diagnostics.memory import StagesMemory
    from redivider.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Memory:
    """Bytes that a pass through a chain allocates, besides its parameters and its input."""

    held: int
    """Bytes held between forward and backward, including the output."""
    peak: int
    """Largest number of bytes at any time, including the gradients of the parameters."""
    peak_without_gradients: int
    """Largest number of bytes at any time, without the gradients of the parameters."""

    def __str__(self) -> str:
        return f"held {self.held / 1024:,.0f} KiB, peak {self.peak / 1024:,.0f} KiB"


@overload
def measure_memory(model: nn.Module, x: Any, /, **side: Any) -> Memory: ...
@overload
def measure_memory(model: "Pipeline", x: Any, /, **side: Any) -> "StagesMemory": ...
def measure_memory(model: Any, x: Any, /, **side: Any) -> "Memory | StagesMemory":
    """Run a forward and a backward of a module, and count the bytes that they allocate.

    Of a pipeline, count the bytes that every stage holds when it is full of inputs like x. That
    runs on a copy of the model, and needs no target.
    """
    if not isinstance(model, nn.Module):
        if not hasattr(model, "measure_memory"):
            raise TypeError(
                f"measure_memory takes a module or a pipeline, got {type(model).__name__}"
            )
        stages: StagesMemory = model.measure_memory(x, **side)
        return stages
    parameters = [param for param in model.parameters() if param.requires_grad]
    wanted = [*parameters, *(tensor for tensor in tensors_of((x, side)) if tensor.requires_grad)]
    grads: Sequence[Tensor | None] = ()
    with restored(model), torch.enable_grad(), Live() as live:
        output = model(x, **side)
        held = live.bytes
        roots = [tensor.sum() for tensor in tensors_of(output) if tensor.requires_grad]
        if roots:
            ones = [*map(torch.ones_like, roots)]
            grads = torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        return Memory(held, live.peak, live.peak_without(grads[: len(parameters)]))


@dataclass(frozen=True)
class MemoryComparison:
    """Memory of one model by several kinds of backward."""

    by_backward: dict[str, Memory]
    gradients: int
    """Bytes of the gradients of all weights, which every backward needs besides."""

    def __str__(self) -> str:
        """Format a table; its numbers are without the gradients of weights."""
        rows = [
            (backward, format_bytes(memory.held), format_bytes(memory.peak_without_gradients))
            for backward, memory in self.by_backward.items()
        ]
        table = format_table([("backward", "held", "peak"), *rows])
        return f"{table}\nand {format_bytes(self.gradients)} for the gradients of weights"


def compare_memory(
    model: nn.Module,
    x: Any,
    /,
    *,
    backward: Sequence[str] = ("store", "checkpoint", "reverse"),
    **side: Any,
) -> MemoryComparison:
    """Measure the memory of a model by several kinds of backward.

        print(rd.compare_memory(model, x))

    Args:
        model: A chain, or a module with chains inside.
        x: Its input.
        backward: Kinds of backward to compare.
        **side: Its keywords.
    """
    if isinstance(backward, str):
        raise TypeError(f"backward is a list of names: write backward=[{backward!r}]")
    if not any(isinstance(module, Chain) for module in model.modules()):
        name = type(model).__name__
        raise TypeError(f"compare_memory takes a Chain, or a module with chains, got {name}")
    memories = {}
    for name in backward:
        with running_by(name, model):
            memories[name] = measure_memory(model, x, **side)
    gradients = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    return MemoryComparison(memories, gradients)


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes for a table: in KiB below a MiB."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


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
        self._known: dict[int, int] = {}  # ids of allocations, by storage
        self._changes: list[tuple[int, int]] = []  # ids of allocations, and bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in storages_of((args, kwargs)):  # if unknown, allocated outside: counts 0
            self._remember(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result):
            self._remember(storage, storage.nbytes())
        return result

    def _remember(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = number = len(self._changes)
        self._changes.append((number, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._changes.append((self._known.pop(key), -size))
        self.bytes -= size

    @property
    def moment(self) -> int:
        """Number of allocations and releases so far."""
        return len(self._changes)

    def peak_without(self, tensors: Any, since: int = 0, until: int | None = None) -> int:
        """Return the largest number of bytes, had these tensors, still alive, taken none.

        Args:
            tensors: The tensors.
            since: Moment to begin with.
            until: Moment to end with; the present by default.
        """
        left_out = {self._known.get(storage._cdata) for storage in storages_of(tensors)}
        sizes = (0 if number in left_out else size for number, size in self._changes)
        end = None if until is None else until + 1
        return max(islice(accumulate(sizes, initial=0), since, end))


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Return the memory of all tensors of a nested structure, which may be sparse."""
    parts = [part for tensor in tensors_of(tree) for part in _parts(tensor)]
    return [part.untyped_storage() for part in parts]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold the numbers of a tensor: two for a sparse one."""
    if tensor.layout != torch.sparse_coo:
        return [tensor]
    return [tensor._indices(), tensor._values()]
