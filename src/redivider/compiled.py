"""Units compiled one by one: units of one kind share their graphs.

A whole chain is nothing to compile: its nodes and generators are Python's business. What computes
is inside the units, and layers that differ in their weights alone can share one graph.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from redivider.arithmetic import Arithmetic, Checked
from redivider.coupling import Coupling


def compile_units(units: Iterable[nn.Module], **options: Any) -> None:
    """Let what units compute run compiled from now on; `options` are torch.compile's.

    A coupling is compiled whole where it runs as a plain module does, and its `f` where a chain's
    row runs it, in forward and recovery. What has no weights is not worth it.
    """
    runs: dict[Any, Any] = {}
    for unit in units:
        for module in (unit, unit.f) if isinstance(unit, Coupling) else (unit,):
            if any(True for _ in module.parameters()):
                kind = _kind(module)
                if kind not in runs:
                    runs[kind] = [
                        torch.compile(own_code(each), **options)
                        for each in (_run, _run_joint, _run_apart)
                    ]
                # What nn.Module.compile() sets, too.
                module._compiled_call_impl = _Compiled(module, *runs[kind])


class CompiledArithmetic(Arithmetic):
    """Another arithmetic in fused kernels: adding bf16 to float32 takes twice the time without."""

    _inner: Arithmetic

    def __init__(self, inner: Arithmetic, **options: Any) -> None:
        if isinstance(inner, CompiledArithmetic):
            inner = inner._inner
        self.exact = inner.exact
        self._inner = inner
        self._add, self._subtract, self._store, self._real = (
            torch.compile(each, **options)
            for each in (inner.add, inner.subtract, inner.store, inner.real)
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
    def __init__(self, module: nn.Module, run: Any, joint: Any, apart: Any) -> None:
        self._module, self._run, self._joint, self._apart = module, run, joint, apart

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and isinstance(self._module, Coupling):  # in the row of a chain
            return self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._run(self._module, *args, **kwargs)

    def run_joint(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate a coupling's f at `a`; give what it is, and stand-ins for `c` and `a`.

        These hold no numbers. Gradients that enter the graph by them meet there, in the kernels
        that the backward of f has anyway.
        """
        found: tuple[Tensor, Tensor, Tensor] = self._joint(self._module, *args, **kwargs)
        return found

    def run_apart(self, dtypes: tuple[torch.dtype, ...], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a module for its graph alone; give stand-ins for its outputs, in these dtypes.

        What the outputs are is not computed where the backward does not need it, and gradients in
        another precision than the outputs enter the graph as they are.
        """
        return self._apart(self._module, dtypes, *args, **kwargs)


def run_apart(module: nn.Module, grads: Sequence[Tensor | None]) -> Callable[..., Any] | None:
    """What runs a compiled module apart from its outputs, given all their gradients."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if not isinstance(compiled, _Compiled) or any(grad is None for grad in grads):
        return None
    return partial(compiled.run_apart, tuple(grad.dtype for grad in grads if grad is not None))


def _run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    # The compiler passes over a container's own call, and would see its parts one by one.
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _run_joint(module: nn.Module, a: Tensor, /, **side: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Taking r from a stream is no part of it: compiled together they would not round r, as the
    # forward does, which adds it to the stream as it is here.
    r = module._call_impl(a, **side)  # type: ignore[no-untyped-call]
    return r.detach(), *_StandIns.apply(*_distinct(r, a))  # type: ignore[no-untyped-call]


def _run_apart(
    module: nn.Module, dtypes: tuple[torch.dtype, ...], /, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    output = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    found = _Outputs.apply(dtypes, *_distinct(*outputs))  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], found)


def _distinct(*tensors: Tensor) -> list[Tensor]:
    # Of a tensor that a Function gets twice, torch 2.11's compiler forgets one gradient, and later
    # ones do not compile the Function. In a graph a view costs nothing.
    return [each.view_as(each) for each in tensors]


class _Outputs(torch.autograd.Function):
    """Tensors without numbers, by which gradients of outputs enter the graph of a module."""

    @staticmethod
    def forward(ctx: Any, dtypes: tuple[torch.dtype, ...], *outputs: Tensor) -> Any:
        pairs = zip(outputs, dtypes, strict=True)
        return tuple(torch.empty_like(each, dtype=dtype) for each, dtype in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads


class _StandIns(torch.autograd.Function):
    """Two tensors without numbers, by which gradients of `c` and `a` enter the graph of f."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(a), torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, dc: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
        return dc, da  # autograd gives the first one r's dtype


_numbers = count()


def own_code(function: Any) -> FunctionType:
    """A copy with code of its own: graphs are cached by code, and limited in number."""
    code = function.__code__.replace(co_name=f"{function.__name__}_kind_{next(_numbers)}")
    return FunctionType(code, function.__globals__, code.co_name)


def _kind(module: nn.Module) -> Any:
    """What modules that can share graphs have in common: all but the values of their weights."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return repr(module), tuple(
        (name, each.shape, each.dtype, each.device) for name, each in tensors
    )
