"""Cuts within a limit on the memory of every stage, and the bytes that they are made of."""

from itertools import accumulate, combinations
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.networks import MLP
from torch import nn

import redivider as rd
from redivider.checks.memory import Live
from redivider.pipeline.balance import StageSizes, UnitBytes, measure_units
from redivider.pipeline.methods import METHODS
from redivider.pipeline.partition import count_costs, cut_by, units_of
from redivider.pipeline.schedule import Schedule

WIDTH = 16


def SGD(stage):
    return torch.optim.SGD(stage.parameters(), lr=0.1)


def uneven_units(depth: int = 4) -> list[nn.Module]:
    """A stem with most of the weights, couplings with most of the work, and a junction between."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(MLP(WIDTH)) for _ in range(depth)]
    middle = [rd.Fuse("concat"), nn.Linear(2 * WIDTH, WIDTH), rd.Duplicate()]
    below, above = couplings[: depth // 2], couplings[depth // 2 :]
    stem = nn.Linear(400, WIDTH)
    return [
        stem,
        rd.Duplicate(),
        *below,
        *middle,
        *above,
        rd.Fuse("concat"),
        nn.Linear(2 * WIDTH, 3),
    ]


def all_cuts(num: int, stages: int) -> list[list[int]]:
    return [
        [b - a for a, b in zip((0, *edges), (*edges, num), strict=True)]
        for edges in combinations(range(1, num), stages - 1)
    ]


def ranges(cut: list[int]) -> list[tuple[int, int, int]]:
    ends = list(accumulate(cut))
    return [(j, end - cut[j], end) for j, end in enumerate(ends)]


units_bytes = st.lists(
    st.builds(UnitBytes, st.booleans(), *[st.integers(0, 9)] * 7), min_size=1, max_size=8
)


@given(units_bytes, st.sampled_from([*METHODS]), st.data())
def test_no_cut_that_fits_is_more_even(units, method, data):
    num = len(units)
    stages = data.draw(st.integers(1, num))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num))
    schedule = Schedule(stages, data.draw(st.sampled_from([0.5, 1, 2])))
    sizes = StageSizes(units, METHODS[method], schedule, data.draw(st.integers(1, 3)), 3)
    limit = data.draw(st.integers(0, 200))

    def load(stage, start, end):
        return sum(costs[start:end]) if sizes(stage, start, end) <= limit else inf

    every = [max(load(*place) for place in ranges(cut)) for cut in all_cuts(num, stages)]
    assert max(load(*place) for place in ranges(cut_by(load, num, stages))) == min(every)
    least = min(max(sizes(*place) for place in ranges(cut)) for cut in all_cuts(num, stages))
    assert max(sizes(*place) for place in ranges(cut_by(sizes, num, stages))) == least


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_it_is_the_most_even_cut_within_the_limit(stages):
    units = uneven_units()
    x = torch.randn(8, 400)
    costs = count_costs(units, "work", x)
    bytes_by_unit = measure_units(units_of(units), x, {})
    sizes = StageSizes(bytes_by_unit, METHODS["petra"], Schedule(stages), 1, 4)
    cuts = all_cuts(len(units), stages)
    needs = {tuple(cut): max(sizes(*place) for place in ranges(cut)) for cut in cuts}
    largest = {
        tuple(cut): max(sum(costs[start:end]) for _, start, end in ranges(cut)) for cut in cuts
    }
    for limit in {min(needs.values()), sorted(needs.values())[len(needs) // 2]}:
        cut = tuple(rd.balance(units, stages, example=x, memory=limit))
        assert needs[cut] <= limit
        assert largest[cut] == min(largest[other] for other in needs if needs[other] <= limit)
    with pytest.raises(ValueError, match=f"the smallest limit is {min(needs.values()):,} bytes"):
        rd.balance(units, stages, example=x, memory=min(needs.values()) - 1)
    free = rd.balance(units, stages, example=x)
    assert rd.balance(units, stages, example=x, memory="1GiB") == free


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.5, 1, 2])
@pytest.mark.parametrize("method", ["petra", "dsp", "delayed", "exact-inverse"])
def test_activations_and_messages_are_those_of_the_pipeline(method, latency):
    units, cut = uneven_units(), [3, 2, 4, 2]
    x = torch.randn(8, 400)
    sizes = StageSizes(
        measure_units(units_of(units), x, {}), METHODS[method], Schedule(4, latency), 1, 2
    )
    options: dict[str, Any] = {"stages": cut, "method": method, "latency": latency}
    pipe = rd.Pipeline(units, loss=F.cross_entropy, optimizer=SGD, **options)
    holdings = rd.measure_memory(pipe, x).stages
    for (stage, start, end), holding in zip(ranges(cut), holdings, strict=True):
        held = holding.activations + holding.messages
        predicted = sizes.in_flight(stage, start, end)
        if METHODS[method].coupling == "nothing":
            assert held == predicted
        else:  # neighbours may keep the same tensor
            assert held <= predicted <= 1.5 * held


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS])
def test_a_pipeline_takes_no_more_than_its_stages(method):
    """All stages in one process, together: what is allocated while they train."""
    units, cut = uneven_units(), [3, 2, 4, 2]
    x, target = torch.randn(8, 400), torch.randint(3, (8,))
    bytes_by_unit = measure_units(units_of(units), x, {})
    pipe = rd.Pipeline(
        units, stages=cut, loss=F.cross_entropy, optimizer=SGD, method=method, capture=False
    )
    with Live() as live:
        for _ in range(20):
            pipe.step(x.clone(), target)
        peak = live.peak
    # Weights were there before, their gradients were not.
    sizes = StageSizes(bytes_by_unit, METHODS[method], Schedule(4), 1, 1)
    predicted = sum(sizes(*place) for place in ranges(cut))
    loss = 4096  # of the loss, and numbers beside the activations
    assert peak <= predicted + loss
    assert 2 * peak >= predicted


def test_the_error_names_the_unit_that_needs_most():
    stem = 401 * WIDTH * 4
    for copies in (2, 4):
        with pytest.raises(ValueError, match=r"stage 0 needs, most of it for unit 0, L") as error:
            x = torch.randn(8, 400)
            rd.balance(uneven_units(), 3, example=x, memory=1, weight_copies=copies)
        needed = int(str(error.value).split("limit is ")[1].split(" ")[0].replace(",", ""))
        activations = 4 * 8 * 400 * 4 + 8 * 400 * 4  # four inputs in flight, and a gradient
        assert copies * stem < needed < copies * stem + activations + 10_000


def test_what_is_missing_is_said():
    with pytest.raises(ValueError, match="memory needs an example"):
        rd.balance(uneven_units(), 2, by="units", memory="1GiB")
    for keywords, message in (
        ({"memory": "many"}, "memory is a whole number of bytes"),
        ({"memory": 1, "method": "petr"}, "petra"),
        ({"memory": 1, "latency": 0.3}, "multiple of 0.5"),
    ):
        options: dict[str, Any] = keywords
        with pytest.raises(ValueError, match=message):
            rd.balance(uneven_units(), 2, example=torch.randn(2, 400), **options)
    with pytest.raises(ValueError, match="cannot be cut into 99 stages"):
        rd.balance(uneven_units(), 99, example=torch.randn(2, 400), memory=1)


@pytest.mark.slow
def test_units_take_the_same_on_the_meta_device():
    """So that a plan needs neither the device nor the memory of the model."""
    by_device = []
    for device in ("cpu", "meta"):
        model = rd.create_model("revnet18", device=device, image_size=32, width=4)
        x = torch.zeros(2, 3, 32, 32, device=device)
        by_device.append(measure_units(units_of(model), x, {}))
    assert by_device[0] == by_device[1]
