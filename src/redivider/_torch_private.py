"""Private names of torch that the package depends on; tests/unit/test_torch_private.py checks each.

Checked with torch 2.11 and 2.13. `Tensor._version`, `Tensor._base`, `torch._foreach_*` and
`torch.utils._pytree` are used directly: they are old, and many libraries rely on them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward ends; call this from inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_keeps_graph() -> bool:
    """Return whether the running backward retains its graph; call this from inside a backward."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for a number of cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled function that a call of the module runs, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let a call of the module run a compiled function, as `nn.Module.compile` does."""
    module._compiled_call_impl = call


def call_uncompiled(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but without its compiled function."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def original_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile(module)` wraps, or None."""
    return getattr(module, "_orig_mod", None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Return whether torch.export traces this code.

    It is called outside of the graph: inside of it, torch 2.11 says so of every compiled graph.
    """
    return torch.compiler.is_exporting()


def lower_to_input(operator: Any) -> None:
    """Let Inductor compile an operator of one tensor to that tensor, without a copy."""
    from torch._inductor.lowering import register_lowering

    register_lowering(operator, type_promotion_kind=None)(lambda x: x)


def loops_in_order() -> contextlib.AbstractContextManager[None]:
    """Compile without reordering loops after fusion.

    On updates of lists of tensors the reordering of torch 2.11 stops with an AssertionError.
    """
    from torch._inductor import config

    patch: contextlib.AbstractContextManager[None] = config.patch(loop_ordering_after_fusion=False)
    return patch


def scale_of_second(node: Any) -> float:
    """Return the factor of the second term of a sum, from its node in a graph."""
    return float(node._saved_alpha)


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks, forward or backward."""
    has_backward_hooks = bool(module._backward_hooks or module._backward_pre_hooks)
    return has_forward_hooks(module) or has_backward_hooks


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def remove_forward_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Remove a hook from a module, without the handle; return whether it was there."""
    was_there = False
    for key, other in list(module._forward_pre_hooks.items()):
        if other is hook:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            was_there = True
    return was_there


def has_grad_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks for its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks see the tensors that graphs save, as those of torch's checkpoint do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def prefix_store(prefix: str, store: Any) -> Any:
    """Return a store that adds a prefix to all keys."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend that a process group uses for a device.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps it.
    """
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


@contextlib.contextmanager
def nccl_group(backend: Any) -> Iterator[None]:
    """Issue the NCCL calls inside as one group."""
    with contextlib.suppress(RuntimeError, AttributeError):
        backend._group_start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError, AttributeError):
            backend._group_end()


class Operation(NamedTuple):
    """Send or receive of a tensor."""

    is_send: bool
    tensor: Tensor
    rank: int


def begin_batch(group: Any, batch: Sequence[Operation]) -> list[Any]:
    """Begin sends and receives as one batch; return the works.

    On a GPU without the checks of `dist.batch_isend_irecv` and torch's dispatcher, which take the
    host longer.
    """
    device = batch[0].tensor.device
    if device.type != "cuda":
        functions: tuple[Any, Any] = dist.irecv, dist.isend
        return dist.batch_isend_irecv(
            [dist.P2POp(functions[is_send], tensor, rank, group) for is_send, tensor, rank in batch]
        )
    backend = backend_of(group, device)
    backend._start_coalescing()
    for is_send, tensor, rank in batch:
        (backend.send if is_send else backend.recv)([tensor], dist.get_group_rank(group, rank), 0)
    return [backend._end_coalescing()]
