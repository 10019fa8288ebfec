"""The planner's choice against an exhaustive search."""

from math import ceil, log2
from random import Random

import pytest
from support.pipelines import batches, build, network

import redivider as rd
from redivider.pipeline.balance import UnitBytes, measure_units
from redivider.pipeline.partition import units_of
from redivider.pipeline.planner import (
    METHODS,
    STATE,
    TICKS,
    Candidate,
    Choice,
    Cluster,
    Planner,
    UnitCosts,
)
from redivider.train.pipeline_plan import PipelinePlan


def unit_bytes(couples: bool, trained: int, input: int, output: int, graph: int) -> UnitBytes:
    return UnitBytes(couples, trained, 0, input, input, output, graph, graph + 5)


def make_planner(seed: int) -> Planner:
    dice = Random(seed)
    num = dice.randint(2, 8)

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(dice.randint(low, high) for _ in range(num))

    couples = [False, *(dice.choice([True, True, False]) for _ in range(num - 1))]
    sizes = zip(couples, draw(1, 50), draw(1, 9), draw(1, 9), draw(10, 40), strict=True)
    units = UnitCosts(
        seconds=tuple(dice.uniform(0.5, 2.0) for _ in range(num)),
        bytes=tuple(unit_bytes(*own) for own in sizes),
    )
    cluster = Cluster(
        devices=dice.choice([1, 2, 3, 4, 6, 8]),
        memory=dice.choice([float("inf"), 1500.0, 500.0, 200.0]),
        delay=dice.choice([0.0, 0.5, 5.0]),
        bandwidth=dice.choice([float("inf"), 10.0]),
        overhead=dice.choice([0.0, 0.5]),
    )
    return Planner(units, cluster, dice.choice([8, 12, 24]), dice.choice([0.5, 1.0, 4.0]))


def search(planner: Planner, method: str) -> Choice | None:
    """Try every setting; keep the first of the best."""
    best = None
    devices, samples = planner.cluster.devices, planner.samples
    for stages in range(1, min(devices, len(planner.units.seconds)) + 1):
        for replicas in range(1, devices + 1):
            for microbatch in range(1, samples + 1):
                for num in range(1, samples + 1):
                    if stages * replicas != devices or replicas * microbatch * num != samples:
                        continue
                    settings = [(latency, False) for latency in TICKS]
                    if method not in ("petra", "delayed-graph"):
                        settings = [(0.5, False), (0.5, True)]
                    for latency, recompute in settings:
                        late = 2 * latency * (stages - 1) / num
                        if method in ("petra", "delayed-graph") and late > planner.max_late:
                            continue
                        choice = planner.evaluate(
                            Candidate(method, stages, replicas, microbatch, num, latency, recompute)
                        )
                        if choice is not None and (best is None or choice.rank > best.rank):
                            best = choice
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 50, 10)])
def test_the_choice_is_that_of_an_exhaustive_search(seeds):
    for seed in seeds:
        planner = make_planner(seed)
        for method in METHODS:
            expected, choice = search(planner, method), planner.choose(method)
            if expected is None:
                assert choice is None
                continue
            assert choice is not None
            assert choice.rank == expected.rank, (seed, method)
            assert choice.memory <= planner.cluster.memory


def test_limits_are_kept():
    couplings = [unit_bytes(couples, 1, 1, 1, 10) for couples in (False, True, True, False)]
    units = UnitCosts((1.0,) * 4, tuple(couplings))
    far = Cluster(4, delay=10.0)
    tight, loose = (Planner(units, far, 16, late).choose("petra") for late in (0.4, 4.0))
    assert tight is not None and loose is not None
    assert tight.simulation.late <= 0.4 < loose.simulation.late <= 4.0
    assert tight.throughput < loose.throughput
    assert Planner(units, Cluster(4, memory=1.0), 16).choose("petra") is None


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.5, 1, 2])
@pytest.mark.parametrize("method", ["petra", "delayed-graph"])
def test_bytes_are_those_that_a_pipeline_holds(method, latency):
    """Beside these, a stage has weights and optimizer, and what it needs while it runs."""
    x, _ = next(batches(1))
    measured = measure_units(units_of(network()), x, {})
    costs = UnitCosts((1.0,) * len(measured), tuple(measured), batch=len(x))
    planner = Planner(costs, Cluster(3), 3 * len(x), max_late=100)
    candidate = Candidate(method, 3, 1, len(x), 3, latency)
    cut = planner.cut(3)
    pipe = build(rd.Pipeline, network(), cut, method, 3, latency)
    held = [stage.total for stage in rd.measure_memory(pipe, x).stages]
    ends = [sum(cut[: j + 1]) for j in range(3)]
    for j, size in enumerate(planner.memory(candidate, [])):
        own = measured[ends[j] - cut[j] : ends[j]]
        weights = sum(STATE * unit.trained + unit.fixed for unit in own)
        running = max(unit.peak for unit in own)
        if method == "delayed-graph" or j == 2:  # one more graph of the stage
            running += sum(unit.graph for unit in own) + own[0].input
            assert held[j] <= size - weights <= 1.25 * (held[j] + running)
        else:
            assert size == held[j] + weights + running


def test_replicas_average_by_a_ring_or_a_tree():
    for trained, delay, bandwidth in ((1000, 0.0, 10.0), (10, 1.0, 10.0)):
        units = UnitCosts((1.0,), (unit_bytes(False, trained, 1, 1, 1),))
        for num in (2, 8):
            planner = Planner(units, Cluster(num, delay=delay, bandwidth=bandwidth), num)
            choice = planner.evaluate(Candidate("petra", 1, num, 1, 1, 1))
            assert choice is not None
            ring = 2 * (num - 1) * (delay + trained / num / bandwidth)
            tree = 2 * ceil(log2(num)) * delay + 2 * trained / bandwidth
            assert num / choice.throughput == pytest.approx(4 + min(ring, tree))
            assert (ring < tree) == (not delay or num == 2)


def test_advice_names_rivals_that_reach_more():
    planner = Planner(UnitCosts((1.0,), (unit_bytes(False, 1, 1, 1, 1),)), Cluster(1), 1)
    choices = {name: planner.choose(name) for name in ("petra", "1f1b")}
    own = {name: choice for name, choice in choices.items() if choice is not None}
    plan = PipelinePlan("revnet18", own, devices=1, nodes=1, options={})
    first, *_ = plan.advice.splitlines()
    assert first == "1F1B, data parallel reaches 33% more here, without late gradients."
