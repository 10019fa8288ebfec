"""Trial runs that leave a module unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from torch import nn

from redivider.chain import Chain
from redivider.replay.copies import remember_buffers


@contextmanager
def restored(module: nn.Module, *, checks_drift: bool = False) -> Iterator[None]:
    """Restore random state, buffers and counts of steps afterwards.

    Args:
        module: The module.
        checks_drift: Whether every step inside checks for drift, if some do outside; otherwise
            none does. Only a chain on a grid may warn of it.
    """
    restore_buffers = remember_buffers([*module.modules()])
    devices = {parameter.device for parameter in module.parameters()}
    devices = {device for device in devices if device.type not in ("cpu", "meta")}
    chains = [
        (child, (child.check_every, child.drift_tolerance, child._num_steps))
        for child in module.modules()
        if isinstance(child, Chain)
    ]
    for chain, (check_every, _, _) in chains:
        chain.check_every = int(checks_drift and check_every > 0)
        chain.drift_tolerance = inf
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for chain, values_of_chain in chains:
                chain.check_every, chain.drift_tolerance, chain._num_steps = values_of_chain
            restore_buffers()


@contextmanager
def running_by(backward: str, module: nn.Module) -> Iterator[None]:
    """Run all chains of a module by a kind of backward inside the context."""
    configured = [(child, child.backward) for child in module.modules() if isinstance(child, Chain)]
    try:
        for chain, _ in configured:
            chain.backward = backward
        yield
    finally:
        for chain, own in configured:
            chain.backward = own
