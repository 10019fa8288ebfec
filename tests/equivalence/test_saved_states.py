"""States saved by earlier commits can be loaded, and training resumes as it did then.

Add a state after a change of the format: `python tests/equivalence/test_saved_states.py NAME`.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import redivider as rd

FOLDER = Path(__file__).parent / "saved_states"
NUM_BEFORE, NUM_AFTER = 13, 12


def pipeline() -> rd.Pipeline:
    """Return a pipeline with every kind of unit, an optimizer with a state, and accumulation."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(4)]
    norm = nn.BatchNorm1d(8)
    units = [nn.Linear(5, 4), rd.Duplicate(), *couplings, rd.Fuse("concat"), norm, nn.Linear(8, 3)]
    return rd.Pipeline(
        rd.Chain(units).double(),
        stages=4,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.AdamW(stage.parameters(), lr=0.01),
        lr_lambda=lambda update: 1 / (1 + update),
        accumulate=3,
        latency=2,
        seed=5,
    )


def run(pipe: rd.Pipeline, first: int, last: int) -> list[float]:
    """Run ticks on inputs that do not depend on torch's random generator; return the losses."""
    losses = []
    for n in range(first, last):
        x = torch.tensor([[((7 * n + 3 * i + j) % 11) / 5 - 1 for j in range(5)] for i in range(4)])
        tick = pipe.step(x.double(), torch.tensor([(n + i) % 3 for i in range(4)]))
        losses += [] if tick.loss is None else [float(tick.loss)]
    return losses


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_it_goes_on_as_it_did(name):
    pipe = pipeline()
    with torch.no_grad():
        for parameter in pipe._chain.parameters():
            parameter.zero_()  # all of it comes from the state
    pipe.load(FOLDER / name / "state")
    losses = run(pipe, NUM_BEFORE, NUM_BEFORE + NUM_AFTER)
    losses += [float(tick.loss) for tick in pipe.flush(update=True) if tick.loss is not None]
    assert losses == pytest.approx(
        json.loads((FOLDER / name / "losses.json").read_text()), rel=1e-9
    )


if __name__ == "__main__":
    pipe = pipeline()
    run(pipe, 0, NUM_BEFORE)
    pipe.save(FOLDER / sys.argv[1] / "state")
    losses = run(pipe, NUM_BEFORE, NUM_BEFORE + NUM_AFTER)
    losses += [float(tick.loss) for tick in pipe.flush(update=True) if tick.loss is not None]
    (FOLDER / sys.argv[1] / "losses.json").write_text(json.dumps(losses) + "\n")
