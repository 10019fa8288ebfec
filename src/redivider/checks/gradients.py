"""Comparison of a chain's gradients with those of plain backprop."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redivider.chain import Chain
from redivider.checks.report import Errors, verify_chain, widen
from redivider.checks.restore import restored, running_by
from redivider.errors import UnitError
from redivider.replay.autocast import is_autocast_enabled
from redivider.tree import as_leaf, map_tensors, tensors_of

GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}


def check_gradients(
    chain: Chain, x: Any, /, *, tolerance: float | None = None, **side: Any
) -> Errors:
    """Compare the chain's gradients with those of plain backprop ("store") through the same units.

    An error is divided by the larger of that gradient's norm and 1e-3 of the whole gradient's, so
    that gradients whose true value is zero do not count.

    Args:
        chain: The chain; its gradients are compared for all parameters and tensors of the input.
        x: Its input.
        tolerance: Largest relative error allowed. By default 1e-10 for float64, 1e-3 for float32,
            5e-2 for fewer bits and under autocast, and 0 for an exact arithmetic.
        **side: Its keywords.
    """
    verify_chain(chain)
    x, side = map_tensors(as_leaf, (x, side))
    leaves = tensors_of((x, side))
    wanted = {f"input {i}": leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
    wanted |= {name: param for name, param in chain.named_parameters() if param.requires_grad}
    if not wanted:
        raise ValueError("neither a parameter nor the input requires grad: nothing to compare")
    got = _gradients(chain, x, side, list(wanted.values()))
    with running_by("store", chain):
        true = _gradients(chain, x, side, list(wanted.values()))
    if tolerance is None:
        first = next(iter(wanted.values()))
        casts = is_autocast_enabled(first.device)
        dtype = torch.get_autocast_dtype(first.device.type) if casts else first.dtype
        known = GRADIENT_TOLERANCE.get(dtype.to_real(), 5e-2)
        tolerance = 0.0 if chain.arithmetic.exact else known
    floor = 1e-3 * torch.stack([widen(grad).norm() for grad in true]).norm().item()
    errors = {
        name: (widen(a) - widen(b)).norm().item() / max(widen(b).norm().item(), floor, 1e-300)
        for name, a, b in zip(wanted, got, true, strict=True)
    }
    report = Errors(f"relative error of the gradients of {chain.backward!r}", errors)
    for name, error in errors.items():
        if not error <= tolerance:
            raise UnitError(
                f"{name}: its gradient differs from plain backprop's by {error:.1e}, more than "
                f"{tolerance:.1e}\n{report}"
            )
    return report


def _gradients(
    chain: Chain, x: Any, side: dict[str, Any], wanted: Sequence[Tensor]
) -> list[Tensor]:
    with restored(chain), torch.enable_grad():
        outputs = [y for y in tensors_of(chain(x, **side)) if y.requires_grad]
        if not outputs:
            raise ValueError("no output of the chain has a gradient: nothing to compare")
        # Cotangents must not be constant: a plain sum would hide rows that are swapped.
        cotangents = [torch.linspace(-1, 1, y.numel()).to(y).view_as(y) for y in outputs]
        return list(
            torch.autograd.grad(
                outputs, wanted, cotangents, allow_unused=True, materialize_grads=True
            )
        )
