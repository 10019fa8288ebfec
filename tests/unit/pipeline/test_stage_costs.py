"""Measured stages: bytes that the simulator predicts with them are those that pipelines hold."""

import pytest
import torch
from support.pipelines import CUTS, batches, build, network

import redivider as rd
from redivider.pipeline.simulate import ASYNCHRONOUS as METHODS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "latency"),
    [
        *[(method, 1) for method in METHODS],
        *[(method, latency) for method in ("petra", "dsp") for latency in (0.5, 2)],
    ],
)
def test_predicted_bytes_are_those_that_a_pipeline_holds(method, latency):
    cut = CUTS[5]
    x, _ = next(batches(1))
    costs = rd.measure_stages(network(), cut, x, method=method, repeats=1)
    predicted = rd.simulate(method, len(cut), latency=latency)
    pipe = build(rd.Pipeline, network(), cut, method, 2, latency)
    memory = rd.measure_memory(pipe, x)
    for j, stage in enumerate(memory.stages):
        assert costs.kept[j] * predicted.held[j] == stage.activations, j
    totals = [stage.activations + stage.messages for stage in memory.stages]
    assert costs.held(pipe.schedule) == totals
    assert sum(totals) > 0


def test_the_model_stays_as_it_was():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    costs = rd.measure_stages(model, CUTS[3], next(batches(1))[0], repeats=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(costs.weights) == sum(p.nbytes for p in model.parameters())
    assert min(costs.forward) > 0 and min(costs.backward) > 0 and min(costs.graph) > 0
    assert len(str(costs).splitlines()) == 4
