"""Networks and runs for pipelines over processes, the same in one process and in several."""

import torch
import torch.nn.functional as F
from torch import nn

import redivider as rd
from support.networks import MLP, Attention, Buffered

NUM_UNITS = 9
DEVICE = "cpu"  # of models and micro-batches; another one where ranks are on a GPU


class Flat(nn.Module):
    def forward(self, streams):
        return torch.cat(streams, -1).mean(1)


def model(dropout: float = 0.3, norm: bool = True) -> rd.Chain:
    """Return a chain with everything that has a state: dropout, batch norm, a buffer, a mask."""
    torch.manual_seed(0)
    units = [
        nn.Linear(5, 8),
        rd.Duplicate(),
        rd.Coupling(MLP(8, dropout=dropout)),
        rd.Coupling(Attention(8), takes=("mask",)),
        rd.Coupling(Buffered(8) if norm else MLP(8)),
        rd.Coupling(MLP(8)),
        Flat(),
        nn.BatchNorm1d(16) if norm else nn.LayerNorm(16),
        nn.Linear(16, 3),
    ]
    return rd.Chain(units).to(DEVICE)


def batch(n: int, size: int = 4, data_rank: int = 0):
    """Return input, target and mask of a micro-batch, different for every replica."""
    generator = torch.Generator().manual_seed(1000 * data_rank + n)
    x = torch.randn(size, 6, 5, generator=generator)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(-n - 1))
    target = torch.randint(3, (size,), generator=generator)
    return x.to(DEVICE), target.to(DEVICE), mask.to(DEVICE)


def sgd(stage: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)


def muon(stage: nn.Module) -> torch.optim.Optimizer:
    return rd.Muon(stage, 0.02, weight_decay=0.1)


def options(**changes):
    return {
        "loss": F.cross_entropy,
        "optimizer": sgd,
        "lr_lambda": lambda update: 1 / (1 + 0.1 * update),
        "seed": 7,
        "capture": False,  # eager ticks, as those of a pipeline over processes are
        **changes,
    }


def run(pipe, first: int, last: int, data_rank: int = 0, size: int = 4) -> list:
    """Feed micro-batches; return the losses that became known, with their micro-batches."""
    ticks = []
    for n in range(first, last):
        x, target, mask = batch(n, size, data_rank)
        ticks.append(pipe.step(x, target, mask=mask))
    return [(tick.microbatch, tick.loss) for tick in ticks if tick.loss is not None]


def finish(pipe) -> list:
    return [(tick.microbatch, tick.loss) for tick in pipe.flush(update=True)]


def equal(one: dict, other: dict) -> bool:
    """Return whether two state dicts are equal to the last bit, on whatever device."""
    return list(one) == list(other) and all(
        torch.equal(tensor.cpu(), other[name].cpu()) for name, tensor in one.items()
    )
