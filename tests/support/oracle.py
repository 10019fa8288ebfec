"""Plain autograd through the same units, written as the equations say; nothing of Chain in it."""

import torch
from torch import Tensor, nn

import redivider as rd


def run_plainly(units, x, **side):
    """Every coupling as (b + f(a), a), with the caller's graph."""
    for unit in units:
        own = {name: side[name] for name in getattr(unit, "takes", ()) if name in side}
        if isinstance(unit, rd.Coupling):
            a, b = x
            x = (b + unit.f(a, **own), a)
        else:
            x = unit(x, **own)
    return x


def weigh(y) -> Tensor:
    """A loss that treats every output differently, so that swapped rows or streams show."""
    outputs = y if isinstance(y, tuple) else (y,)
    total = 0.0
    for k, out in enumerate(outputs):
        weights = (out.detach() * 0).add(1).flatten().cumsum(0).sin().view_as(out) + 0.1 * k
        total = total + (out.float() if out.dtype.itemsize < 4 else out).mul(weights).sum()
        total = total + out.square().mean()
    return total


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    """The gradients now in place, by parameter, and those of the inputs."""
    found = {name: each.grad for name, each in model.named_parameters()}
    return found | {f"input {i}": each.grad for i, each in enumerate(inputs)}


def worst_error(got: dict[str, Tensor | None], true: dict[str, Tensor | None]) -> float:
    """Error over the larger of a gradient's norm and 1e-3 of the whole gradient's norm."""
    assert got.keys() == true.keys()
    missing = [n for n in true if (got[n] is None) != (true[n] is None)]
    assert not missing, f"gradient missing or surplus: {missing}"
    both = [(got[n], true[n]) for n in true if true[n] is not None]
    assert both, "there is no gradient to compare"
    whole = sum(t.double().square().sum() for _, t in both).sqrt()
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
