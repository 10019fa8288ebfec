"""A pipeline of everything that has a state: dropout, batch norm, buffers, a loss that learns."""

import torch
import torch.nn.functional as F
from torch import nn

import redivider as rd
from support.networks import MLP, Attention, Buffered

OPTIMIZERS = {
    "sgd": lambda stage: torch.optim.SGD(stage.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda stage: torch.optim.AdamW(stage.parameters(), lr=0.01),
    "muon": lambda stage: rd.Muon(stage, 0.01, weight_decay=0.1),
}


class Scaled(nn.Module):
    """A loss with a parameter, and extra outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output, target):
        loss = F.cross_entropy(output * self.scale, target)
        return loss, {"hits": (output.argmax(1) == target).sum()}


def build(method="petra", optimizer="adamw", *, seed=0, stages=(1, 3, 2, 3), **options):
    """Return a model with everything that has a state, and its pipeline."""
    torch.manual_seed(seed)
    units = [
        nn.Linear(5, 8),
        rd.Duplicate(),
        rd.Coupling(MLP(8, dropout=0.3)),
        rd.Coupling(Attention(8), takes=("mask",)),
        rd.Coupling(Buffered(8)),
        Flat(),
        nn.BatchNorm1d(16),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    ]
    model = rd.Chain(units)
    pipe = rd.Pipeline(
        model,
        stages=list(stages),
        loss=Scaled(),
        optimizer=OPTIMIZERS[optimizer],
        method=method,
        seed=7,
        **{"accumulate": 2, **options},
    )
    return model, pipe


class Flat(nn.Module):
    """A junction that fuses the streams and takes the mean over tokens."""

    def forward(self, streams):
        return torch.cat(streams, -1).mean(1)


def feed(pipe, start: int, number: int) -> list:
    """Feed `number` micro-batches; return the micro-batch, loss and outputs of every tick."""
    seen = []
    for i in range(start, start + number):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(6, 4, 5, generator=generator)
        mask = torch.rand(4, 4, generator=generator)
        tick = pipe.step(x, torch.randint(3, (6,), generator=generator), mask=mask)
        seen.append((tick.microbatch, tick.loss, tick.aux))
    return seen
