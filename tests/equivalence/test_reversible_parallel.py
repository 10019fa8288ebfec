"""Reversible blocks under DDP and FSDP2: the gradient of the joined batch."""

from typing import Any

import pytest
import torch
from support.compressed import follow
from support.networks import MLP
from support.oracle import weigh, worst_error
from support.processes.launch import launch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import redivider as rd

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.dropout = MLP(8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.mlp(x))


def build():
    torch.manual_seed(3)
    body = nn.Sequential(*(Block() for _ in range(4)))
    return nn.Sequential(nn.Linear(6, 8), body, nn.Linear(8, 3)).double()


def run(model, rank):
    """Return the loss of a rank's own samples; its random numbers are its own, too."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=generator)
    torch.manual_seed(10 + rank)
    return weigh(model(x))


def expected():
    model = build()
    follow(model[1], 2)
    for rank in range(2):
        (run(model, rank) / 2).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def gathered(model):
    return {
        name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        for name, param in model.named_parameters()
    }


def replicated(rank: int) -> dict[str, float]:
    errors = {}
    variants: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in variants:
        model = DistributedDataParallel(rd.make_reversible(build(), 2), **options)
        for _ in range(2):
            model.zero_grad()
            run(model, rank).backward()
        errors[str(options)] = worst_error(gathered(model.module), expected())
    return errors


def sharded(rank: int) -> dict[str, float]:
    errors = {}
    for reshard in (True, False):
        model = rd.make_reversible(build(), 2)
        for block in model[1]:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model)
        for _ in range(2):
            model.zero_grad()
            run(model, rank).backward()
        errors[str(reshard)] = worst_error(gathered(model), expected())
    return errors


@pytest.mark.parametrize("function", [replicated, sharded])
def test_gradients_are_those_of_the_joined_batch(function, tmp_path):
    for errors in launch(function, tmp_path):
        assert max(errors.values()) <= 1e-11, errors
