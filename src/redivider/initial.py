"""Initial weights: a function of the seed and the unit's name, and of nothing else.

A process that holds part of a model draws the same weights for it as one that holds the whole
model. They are drawn on the CPU, unit by unit, whatever the device and whatever was built before.
"""

from collections.abc import Mapping

import torch
from torch import nn

from redivider.errors import UnitError, naming
from redivider.replay.seeded import mix_seeds, seeded


def materialise(
    units: Mapping[str, nn.Module] | nn.Module, *, seed: int, device: torch.device | str = "cpu"
) -> None:
    """Allocate units on a device and draw their initial weights; shared parameters stay shared.

    A shared parameter is drawn with the first unit that has it, so a subset must hold that one.

    Args:
        units: Units by name, or a chain; best built on the meta device, where they take no memory.
        seed: Seed of the whole model.
        device: Device of the weights.
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
    """Let every module draw its own weights: children first, so that a parent may change theirs."""
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
    """Map every repeated place of a parameter to its first place."""
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
