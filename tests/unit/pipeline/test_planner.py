"""The planner's choice against an exhaustive search."""

from random import Random

import pytest

from redivider.pipeline.planner import (
    METHODS,
    TICKS,
    Candidate,
    Choice,
    Cluster,
    Planner,
    UnitCosts,
)


def make_planner(seed: int) -> Planner:
    dice = Random(seed)
    num = dice.randint(2, 8)

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(dice.randint(low, high) for _ in range(num))

    units = UnitCosts(
        seconds=tuple(dice.uniform(0.5, 2.0) for _ in range(num)),
        kept=(dice.randint(1, 9), *(dice.choice([0, 0, 5]) for _ in range(num - 1))),
        graph=draw(10, 40),
        output=draw(1, 9),
        weights=draw(1, 50),
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
    units = UnitCosts((1.0,) * 4, (1, 0, 0, 1), (10,) * 4, (1,) * 4, (1,) * 4)
    far = Cluster(4, delay=10.0)
    tight, loose = (Planner(units, far, 16, late).choose("petra") for late in (0.4, 4.0))
    assert tight is not None and loose is not None
    assert tight.simulation.late <= 0.4 < loose.simulation.late <= 4.0
    assert tight.throughput < loose.throughput
    assert Planner(units, Cluster(4, memory=1.0), 16).choose("petra") is None
