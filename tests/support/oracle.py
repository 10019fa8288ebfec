"""Plain autograd through the same units, written as the equations say, without Chain."""

from typing import Any

import torch
from torch import Tensor, nn

import redivider as rd


def run_plainly(units, x, **side):
    """Run every coupling as (b + f(a), a), recorded by autograd."""
    for unit in units:
        own = {name: side[name] for name in getattr(unit, "takes", ()) if name in side}
        if isinstance(unit, rd.Coupling):
            a, b = x
            x = (b + unit.f(a, **own), a)
        else:
            x = unit(x, **own)
    return x


def weigh(y) -> Tensor:
    """Return a loss that weighs every output differently, so that swapped rows or streams show."""
    outputs = y if isinstance(y, tuple) else (y,)
    total: Any = 0.0
    for k, out in enumerate(outputs):
        weights = (out.detach() * 0).add(1).flatten().cumsum(0).sin().view_as(out) + 0.1 * k
        total = total + (out.float() if out.dtype.itemsize < 4 else out).mul(weights).sum()
        total = total + out.square().mean()
    return total


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    """Return the current gradients of parameters, by name, and of inputs."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return grads | {f"input {i}": x.grad for i, x in enumerate(inputs)}


def worst_error(got: dict[str, Tensor | None], true: dict[str, Tensor | None]) -> float:
    """Return the largest error, over the gradient's norm or 1e-3 of the whole norm if larger."""
    assert got.keys() == true.keys()
    missing = [n for n in true if (got[n] is None) != (true[n] is None)]
    assert not missing, f"gradient missing or surplus: {missing}"
    pairs = [(got[n], true[n]) for n in true]
    both = [(g, t) for g, t in pairs if g is not None and t is not None]
    assert both, "there is no gradient to compare"
    squares: Any = sum(t.double().square().sum() for _, t in both)
    whole = squares.sqrt()
    assert whole > 0
    return max(
        float((g.double() - t.double()).norm() / max(t.double().norm(), 1e-3 * whole))
        for g, t in both
    )


def equal(one, other) -> bool:
    """Return whether nested dicts, lists and tuples are equal, tensors to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
