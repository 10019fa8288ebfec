"""States that earlier commits saved load today, and go on as they went on then.

To add one, after a change of the format: `python tests/equivalence/test_saved_states.py NAME`.
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
    """Of every kind of unit, by an optimizer with a state, and in the middle of a group."""
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
    """Another micro-batch at every tick; sums that do not depend on a generator of torch's."""
    found = []
    for n in range(first, last):
        x = torch.tensor([[((7 * n + 3 * i + j) % 11) / 5 - 1 for j in range(5)] for i in range(4)])
        tick = pipe.step(x.double(), torch.tensor([(n + i) % 3 for i in range(4)]))
        found += [] if tick.loss is None else [float(tick.loss)]
    return found


@pytest.mark.parametrize("name", sorted(each.name for each in FOLDER.iterdir()))
def test_it_goes_on_as_it_did(name):
    pipe = pipeline()
    with torch.no_grad():
        for parameter in pipe._chain.parameters():
            parameter.zero_()  # all of it comes from the state
    pipe.load(FOLDER / name / "state")
    losses = run(pipe, NUM_BEFORE, NUM_BEFORE + NUM_AFTER)
    losses += [float(tick.loss) for tick in pipe.flush(update=True)]
    assert losses == pytest.approx(
        json.loads((FOLDER / name / "losses.json").read_text()), rel=1e-9
    )


if __name__ == "__main__":
    made = pipeline()
    run(made, 0, NUM_BEFORE)
    made.save(FOLDER / sys.argv[1] / "state")
    then = run(made, NUM_BEFORE, NUM_BEFORE + NUM_AFTER)
    then += [float(tick.loss) for tick in made.flush(update=True)]
    (FOLDER / sys.argv[1] / "losses.json").write_text(json.dumps(then) + "\n")
