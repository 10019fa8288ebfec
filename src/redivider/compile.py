"""Compilation of units one by one, on any device.

A whole chain cannot be compiled: the compiler does not trace its autograd nodes and generators. The
computation is inside the units, and units that differ only in their weights share one graph.
"""

from collections.abc import Iterable
from copy import copy
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from redivider._torch_private import (
    call_uncompiled,
    lower_to_input,
    set_compiled_call,
)
from redivider.arithmetic import Arithmetic, Checked
from redivider.backward.saving import make_saving_contexts, make_trimming_contexts, marks_kept
from redivider.coupling import Coupling
from redivider.tree import tensors_of


def compile_units(
    units: Iterable[nn.Module], *, shared: dict[Any, Any] | None = None, **options: Any
) -> None:
    """Compile units in place.

    A coupling is compiled as a whole for plain runs, and its `f` alone for the row of a chain, in
    forward and recovery. Modules without weights are left as they are.

    Args:
        units: The units.
        shared: Compiled functions that later units may share; a new dict by default.
        options: Options of torch.compile.
    """
    runs: dict[Any, Any] = {} if shared is None else shared
    if options.get("backend", "inductor") == "inductor":
        lower_to_input(torch.ops.redivider.save.default)
    for unit in units:
        for module in (unit, unit.f) if isinstance(unit, Coupling) else (unit,):
            if any(True for _ in module.parameters()):
                kind = _kind(module)
                if kind not in runs:
                    runs[kind] = [
                        torch.compile(own_code(function), **options)
                        for function in (_run, _run_joint, _run_apart, _run_saving, _run_trimmed)
                    ]
                # The attribute that nn.Module.compile() sets.
                set_compiled_call(module, _Compiled(module, *runs[kind]))


class CompiledArithmetic(Arithmetic):
    """Arithmetic in fused kernels: adding bf16 to float32 takes twice the time without them."""

    _inner: Arithmetic

    def __init__(self, inner: Arithmetic, **options: Any) -> None:
        if isinstance(inner, CompiledArithmetic):
            inner = inner._inner
        self.exact = inner.exact
        self._inner = inner
        self._add, self._subtract, self._store, self._real = (
            torch.compile(method, **options)
            for method in (inner.add, inner.subtract, inner.store, inner.real)
        )

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> Any:  # a copy starts uncompiled, as copies of compiled modules do
        return copy, (self._inner,)

    def store(self, x: Tensor) -> Checked:
        return cast(Checked, self._store(x)) if self.exact else self._inner.store(x)

    def real(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        real = self._real if self.exact else self._inner.real
        return cast(Tensor, real(stored, dtype))

    def add(self, stored: Tensor, r: Tensor) -> Checked:
        return cast(Checked, self._add(stored, r))

    def subtract(self, stored: Tensor, r: Tensor) -> Tensor:
        return cast(Tensor, self._subtract(stored, r))


class _Compiled:
    """Compiled call of a module, with the variants that a backward uses."""

    def __init__(
        self, module: nn.Module, run: Any, joint: Any, apart: Any, saving: Any, trimmed: Any
    ) -> None:
        self._module, self._joint, self._apart = module, joint, apart
        self.function = run
        """Compiled function, which modules of a kind share."""
        self._saving, self._trimmed = saving, trimmed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._module, *args, **kwargs)

    def run_joint(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate a coupling's f at `a`; return its value, and stand-ins for `c` and `a`.

        The stand-ins hold no numbers. Gradients of `c` and `a` enter the graph through them, and
        are added there, inside the kernels of f's backward.
        """
        outputs: tuple[Tensor, Tensor, Tensor] = self._joint(self._module, *args, **kwargs)
        return outputs

    def run_apart(self, dtypes: tuple[torch.dtype, ...], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a module for its graph alone; return stand-ins for its outputs, in `dtypes`.

        Values that the backward does not need are not computed, and gradients in another precision
        than the outputs enter the graph without a cast.
        """
        return self._apart(self._module, dtypes, *args, **kwargs)

    def run_saving(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with a graph that keeps its inputs, fused attention and marks alone."""
        with marks_kept():
            return self._saving(self._module, *args, **kwargs)

    def run_trimmed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with a graph that keeps results of products as well."""
        with marks_kept():
            return self._trimmed(self._module, *args, **kwargs)


def _run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    # The compiler skips the call of a container, and would compile its children one by one.
    return call_uncompiled(module, *args, **kwargs)


def _run_saving(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    run = partial(call_uncompiled, module, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, context_fn=make_saving_contexts)


def _run_trimmed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    run = partial(call_uncompiled, module, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, context_fn=make_trimming_contexts)


def _run_joint(module: nn.Module, a: Tensor, /, **side: Any) -> tuple[Tensor, Tensor, Tensor]:
    # The subtraction of r from a stream is not compiled together with f: fused, it would use r
    # before it is rounded, while the forward adds the rounded r.
    r = call_uncompiled(module, a, **side)
    return r.detach(), *_StandIns.apply(*_distinct(r, a))  # type: ignore[no-untyped-call]


def _run_apart(
    module: nn.Module, dtypes: tuple[torch.dtype, ...], /, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    output = call_uncompiled(module, *args, **kwargs)
    outputs = tensors_of(output)
    stand_ins = _Outputs.apply(dtypes, *_distinct(*outputs))  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], stand_ins)


def _distinct(*tensors: Tensor) -> list[Tensor]:
    # If a Function receives one tensor twice, the compiler of torch 2.11 drops one gradient, and
    # later ones do not compile the Function. In a graph a view costs nothing.
    return [tensor.view_as(tensor) for tensor in tensors]


class _Outputs(torch.autograd.Function):
    """Tensors without numbers, through which gradients of outputs enter a module's graph."""

    @staticmethod
    def forward(ctx: Any, dtypes: tuple[torch.dtype, ...], *outputs: Tensor) -> Any:
        pairs = zip(outputs, dtypes, strict=True)
        return tuple(torch.empty_like(output, dtype=dtype) for output, dtype in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads


class _StandIns(torch.autograd.Function):
    """Two tensors without numbers, through which gradients of `c` and `a` enter f's graph."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(a), torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, dc: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
        return dc, da  # autograd casts the first one to r's dtype


_numbers = count()


def own_code(function: Any) -> FunctionType:
    """Return a copy of a function with its own code object.

    The compiler caches graphs by code object, and limits their number.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_kind_{next(_numbers)}")
    return FunctionType(code, function.__globals__, code.co_name)


def _kind(module: nn.Module) -> Any:
    """Return a key that modules share if they differ only in the values of their weights."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return repr(module), tuple(
        (name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors
    )
