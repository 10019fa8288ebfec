"""What stages hold, measured on a copy, is what they hold when they train."""

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP
from support.pipelines import CUTS, batches, build, network
from torch import nn

import redivider as rd
from redivider.pipeline.diagnostics.memory import holdings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stages", "accumulate", "latency"),
    [
        ("petra", 3, 1, 1),
        ("petra", 5, 2, 0.5),
        ("delayed", 3, 2, 1),
        ("delayed-graph", 3, 1, 1),
        ("petra", 1, 1, 1),
    ],
)
def test_a_full_pipeline_holds_what_was_measured(method, stages, accumulate, latency):
    pipe = build(rd.Pipeline, network(), CUTS[stages], method, accumulate, latency)
    stream = batches(40)
    for _ in range(3):  # also in the middle of a training
        pipe.step(*next(stream))
    memory = rd.measure_memory(pipe, next(stream)[0])
    seen = []
    for x, target in stream:
        pipe.step(x, target)
        seen.append(holdings(pipe))
    for stage, by_tick in enumerate(zip(*seen, strict=True)):
        for kind in ("activations", "messages", "weights"):
            most = max(getattr(holding, kind) for holding in by_tick)
            assert getattr(memory.stages[stage], kind) == most, (stage, kind)
    assert memory.held == sum(holding.total for holding in memory.stages)


def test_the_pipeline_goes_on_as_if_nothing_was_measured():
    losses: list[list[object]] = []
    for measures in (False, True):
        pipe = build(rd.Pipeline, network(), CUTS[3], "petra", 2, 1)
        losses.append([])
        for number, (x, target) in enumerate(batches(12)):
            if measures and number == 5:
                state = torch.get_rng_state()
                rd.measure_memory(pipe, x)
                assert torch.equal(torch.get_rng_state(), state)
            losses[-1].append(pipe.step(x, target).loss)
    assert losses[0] == losses[1]


class Masked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = MLP(width)

    def forward(self, x, mask):
        return self.body(x) * mask


def test_a_table_and_keywords():
    norm = nn.BatchNorm1d(64)
    units = [rd.Duplicate(), *(rd.Coupling(Masked(64), takes=("mask",)) for _ in range(4))]
    pipe = rd.Pipeline(
        [nn.Linear(8, 64), *units, rd.Fuse("mean"), norm, nn.Linear(64, 2)],
        stages=2,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
    )
    x, mask = torch.randn(512, 8), torch.ones(512, 64)
    table = str(rd.measure_memory(pipe, x, mask=mask)).splitlines()
    assert [line.split()[0] for line in table] == ["stage", "0", "1", "all"]
    # Two inputs of 512 x 8 and, after the first junction, of 512 x 64.
    assert table[1].split()[1] == f"{2 * 512 * (8 + 64) * 4 / 2**10:.1f}"
    with pytest.raises(TypeError, match="no unit takes the keyword 'masks'"):
        rd.measure_memory(pipe, x, masks=mask)
    assert norm.num_batches_tracked == 0
