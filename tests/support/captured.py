"""A network of nine units, and pipelines that train it by captured ticks or by eager ones."""

import torch
import torch.nn.functional as F
from torch import nn

import redivider as rd
from redivider.pipeline.runners.captured import CapturedRunner
from support.pipelines import Smooth, batches, rate
from support.tape import Tape

CUTS = {2: [3, 6], 3: [2, 4, 3], 5: [1, 2, 2, 2, 2], 9: [1] * 9}
OPTIMIZERS = {
    "sgd": lambda stage: torch.optim.SGD(
        stage.parameters(), lr=rate_of(0.05), momentum=0.9, fused=True
    ),
    "muon": lambda stage: fused_muon(stage, rate_of(0.02)),
    "adamw": lambda stage: torch.optim.AdamW(stage.parameters(), lr=rate_of(0.01), fused=True),
}


def fused_muon(stage, lr):
    """Return Muon as a pipeline makes it on a GPU."""
    optimizer = rd.Muon(stage, lr, weight_decay=0.1)
    optimizer.param_groups[1]["fused"] = True
    return optimizer


def rate_of(number):
    """Return a rate as a captured tick has it, so that kernels are the same ones."""
    return torch.tensor(number, dtype=torch.float64)


def network():
    """Return a chain of nine units, with junctions at both ends and between."""
    torch.manual_seed(0)
    units = [
        nn.Linear(5, 4),
        rd.Duplicate(),
        *(rd.Coupling(Smooth(4)) for _ in range(2)),
        rd.Fuse("concat"),
        rd.Split(),
        rd.Coupling(Smooth(4)),
        rd.Fuse("mean"),
        nn.Linear(4, 3),
    ]
    return rd.Chain(units).double()


def build(cut, *, optimizer="sgd", seed=0, recorded=True, **options):
    """Return a pipeline whose ticks are captured on a tape, or eager."""
    pipe = rd.Pipeline(
        network(),
        stages=cut,
        loss=lambda output, target: (F.cross_entropy(output, target), output.argmax(1)),
        optimizer=OPTIMIZERS[optimizer],
        lr_lambda=rate,
        **options,
    )
    if recorded:
        pipe.execution = CapturedRunner(pipe, lambda num: Tape(num, seed))
    return pipe


def run(pipe, number, start=0):
    """Feed `number` micro-batches; return the micro-batch, loss and outputs of every tick."""
    seen = []
    for x, target in list(batches(start + number))[start:]:
        tick = pipe.step(x, target)
        seen.append((tick.microbatch, tick.loss, tick.aux))
    return seen
