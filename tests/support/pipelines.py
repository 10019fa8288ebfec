"""A network of twelve units, its cuts, and pipelines and references that train it."""

import torch
import torch.nn.functional as F
from torch import nn

import redivider as rd
from support.reference import Reference


class Smooth(nn.Sequential):
    """A residual function with continuous derivatives."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def network(seed: int = 0) -> rd.Chain:
    """Return a chain of twelve units: two rows of couplings, and junctions around them."""
    torch.manual_seed(seed)
    units = [
        nn.Linear(5, 4),
        rd.Duplicate(),
        *(rd.Coupling(Smooth(4)) for _ in range(3)),
        rd.Fuse("concat"),
        nn.Linear(8, 6),
        rd.Split(),
        *(rd.Coupling(Smooth(3)) for _ in range(2)),
        rd.Fuse("mean"),
        nn.Linear(3, 3),
    ]
    return rd.Chain(units).double()


CUTS = {
    1: [12],
    2: [3, 9],
    3: [2, 7, 3],
    5: [1, 2, 4, 3, 2],
    10: [1, 1, 1, 1, 1, 2, 1, 1, 1, 2],
}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    # For look-ahead. Adam's epsilon is applied once to all predicted steps: nearly nothing here,
    # so it does not show.
    "sgd plain": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-30),
    "adamw small": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-30, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-30, betas=(0.9, 0.9), amsgrad=True),
    "groups": lambda p: grouped(list(p)),
    # A list of parameters has no convolutions and embeddings: its matrices are those of the stage.
    "muon": lambda p: rd.Muon(nn.ParameterList(p), 0.02, weight_decay=0.1),
    "muon, sgd": lambda p: rd.Muon(
        nn.ParameterList(p), 0.02, momentum=0.6, scale="spectral", rest="sgd", rest_lr=0.05
    ),
    "rate as a tensor": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01, dtype=torch.float64), eps=1e-30, capturable=False, foreach=False
    ),
}


def grouped(parameters):
    """Return SGD with two groups of parameters, each with a rate of its own."""
    halves = parameters[::2], parameters[1::2]
    groups = [{"params": half, "lr": rate} for half, rate in zip(halves, (0.05, 0.01), strict=True)]
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)


def batches(number: int, seed: int = 1):
    """Yield random micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        x = torch.randn(4, 5, generator=generator).double()
        yield x, torch.randint(3, (4,), generator=generator)


def rate(update: int) -> float:
    """Return the factor of the learning rate at an update."""
    return 1.0 / (1 + 0.1 * update)


def build(cls, model, cut, method, accumulate, latency, optimizer="sgd", **options):
    """Return a pipeline of class `cls` that trains `model`."""
    return cls(
        model,
        stages=cut,
        loss=F.cross_entropy,
        method=method,
        accumulate=accumulate,
        latency=latency,
        optimizer=lambda stage: OPTIMIZERS[optimizer](stage.parameters()),
        lr_lambda=rate,
        **options,
    )


def refer(model, cut, method, accumulate, latency, optimizer="sgd", **options):
    """Return the reference that trains a copy of `model` as the pipeline of `build` does."""
    return Reference(
        model,
        cut,
        loss=F.cross_entropy,
        method=method,
        accumulate=accumulate,
        latency=latency,
        optimizer=OPTIMIZERS[optimizer],
        lr_lambda=rate,
        **options,
    )


class OneOff(rd.Pipeline):
    """A faulty pipeline: stage 1 runs what arrived one tick earlier."""

    earlier = None

    def _forward(self, j, n):
        if j == 1:
            flow = self.in_flight.up[j][n].flow
            self.in_flight.up[j][n].flow, self.earlier = self.earlier or flow, flow
        return super()._forward(j, n)
