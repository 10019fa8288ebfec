"""First weights: a function of a seed and the unit's name, and of nothing else.

A process that holds some units of a model gives them the very weights that they have in the whole
one, whatever else was built before, on whatever device: they are drawn on the CPU, unit by unit.
"""

from collections.abc import Mapping

import torch
from torch import nn

from redivider.errors import UnitError, naming
from redivider.replay.random import mix_seeds, seeded


def materialise(
    units: Mapping[str, nn.Module] | nn.Module, *, seed: int, device: torch.device | str = "cpu"
) -> None:
    """Give units memory on a device, and their first weights; parameters that are shared stay so.

    A shared parameter is drawn with the first unit that has it, so a subset must hold that one.

    Args:
        units: By name, or a chain; best built on the meta device, where they take no memory.
        seed: Of all of them.
        device: Where they are to be.
    """
    if isinstance(units, nn.Module):
        units = dict(units.named_children())
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    ties = _find_ties(units)
    for name, unit in units.items():
        with naming(f"unit {name}"):
            unit.to_empty(device="cpu")
            with seeded(mix_seeds(seed, name)):
                _draw(unit)
            unit.to(device)
    for (module, key), (owner, owned) in ties.items():
        setattr(module, key, getattr(owner, owned))


def _draw(unit: nn.Module) -> None:
    """Let every module draw its own weights; a parent comes after its children, and may correct."""
    for name, module in reversed(list(unit.named_modules())):
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if callable(reset):
            reset()
        elif any(True for _ in (*module.parameters(False), *module.buffers(False))):
            raise UnitError(
                f"{name or 'it'} ({type(module).__name__}) has weights or buffers of its own and "
                "no method reset_parameters() that sets them"
            )


Place = tuple[nn.Module, str]


def _find_ties(units: Mapping[str, nn.Module]) -> dict[Place, Place]:
    """Where a parameter occurs again, and where it occurred first."""
    first: dict[int, Place] = {}
    ties: dict[Place, Place] = {}
    for unit in units.values():
        for module in unit.modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                owner = first.setdefault(id(parameter), (module, key))
                if owner != (module, key):
                    ties[module, key] = owner
    return ties
