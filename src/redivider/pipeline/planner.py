"""Choice of a pipeline for some devices: the fastest that keeps limits on delay and memory.

Candidates are all divisions of the devices into replicas of J stages, of an update into
micro-batches, and all latencies. Each has an upper bound, its throughput if no device ever waited.
Candidates are simulated in the order of their bounds, until no bound is above the best result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf

from redivider.pipeline.partition import cut_evenly, loads_of
from redivider.pipeline.schedule import Schedule
from redivider.pipeline.simulate import LATENCIES as SYNCHRONOUS
from redivider.pipeline.simulate import Simulation, simulate

TICKS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Latencies of the candidates."""
METHODS = ("petra", "delayed-graph", "1f1b", "zero-bubble")
OURS = ("petra", "delayed-graph")
STATE = 4
"""Copies of the weights in memory: weights, gradients and two moments of the optimizer."""


@dataclass(frozen=True)
class UnitCosts:
    """Costs of every unit of a model, for one sample."""

    seconds: tuple[float, ...]
    """Seconds of a forward. A backward takes twice as long, and again as long to recompute."""
    kept: tuple[int, ...]
    """Bytes of the input that PETRA keeps: 0 for a coupling."""
    graph: tuple[int, ...]
    """Bytes that plain autograd keeps."""
    output: tuple[int, ...]
    """Bytes that go on to the next unit."""
    weights: tuple[int, ...]
    """Bytes of the parameters."""


@dataclass(frozen=True)
class Cluster:
    """Devices and the links between them."""

    devices: int
    memory: float = inf
    """Bytes of a device."""
    delay: float = 0.0
    """Seconds of an empty message between two devices."""
    bandwidth: float = inf
    """Bytes per second of a link."""
    overhead: float = 0.0
    """Seconds that a unit takes beside its computation, whatever the micro-batch."""


@dataclass(frozen=True)
class Candidate:
    """Setting of a pipeline, before it is simulated."""

    method: str
    stages: int
    replicas: int
    microbatch: int
    accumulate: int
    latency: float
    recompute: bool = False


@dataclass(frozen=True)
class Choice:
    """Candidate with its prediction."""

    candidate: Candidate
    cut: list[int]
    throughput: float
    """Samples per second."""
    memory: float
    """Bytes of the device with the most."""
    simulation: Simulation = field(compare=False)

    @property
    def rank(self) -> tuple[float, ...]:
        """Order of choices: faster, then less late, then less memory, then fewer stages."""
        own = self.candidate
        return (
            float(f"{self.throughput:.6g}"),
            -self.simulation.late,
            -self.memory,
            -own.stages,
            own.microbatch,
        )


class Planner:
    """Search for the fastest pipeline.

    Args:
        units: Costs of the model's units.
        cluster: The devices.
        samples: Samples of an update.
        max_late: Updates by which a gradient may be late, at most.
    """

    def __init__(
        self, units: UnitCosts, cluster: Cluster, samples: int, max_late: float = 1.0
    ) -> None:
        self.units, self.cluster, self.samples = units, cluster, samples
        self.max_late = max_late
        self._cuts: dict[int, list[int]] = {}

    def choose(self, method: str) -> Choice | None:
        """Return the best pipeline of a method; None if none fits."""
        best: Choice | None = None
        by_bound = sorted(self.candidates(method), key=self.bound, reverse=True)
        for candidate in by_bound:
            if best is not None and self.bound(candidate) < 0.999999 * best.throughput:
                break
            choice = self.evaluate(candidate)
            if choice is not None and (best is None or choice.rank > best.rank):
                best = choice
        return best

    def candidates(self, method: str) -> Iterator[Candidate]:
        """Yield the settings of a method that keep the limit on delay."""
        for stages in _divisors(self.cluster.devices):
            replicas = self.cluster.devices // stages
            if stages > len(self.units.seconds) or self.samples % replicas:
                continue
            for microbatch in _divisors(self.samples // replicas):
                num = self.samples // replicas // microbatch
                if method in SYNCHRONOUS:
                    for again in (False, True):
                        yield Candidate(method, stages, replicas, microbatch, num, 0.5, again)
                    continue
                for latency in TICKS if stages > 1 else TICKS[:1]:
                    if 2 * latency * (stages - 1) / num <= self.max_late:
                        yield Candidate(method, stages, replicas, microbatch, num, latency)

    def bound(self, candidate: Candidate) -> float:
        """Return the samples per second if no device ever waited."""
        forward, backward = self._times(candidate)
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
        return candidate.replicas * candidate.microbatch / slowest

    def evaluate(self, candidate: Candidate) -> Choice | None:
        """Simulate a candidate; return None if it needs too much memory."""
        forward, backward = self._times(candidate)
        again = [f if candidate.recompute else 0.0 for f in forward]
        simulation = simulate(
            candidate.method,
            candidate.stages,
            candidate.accumulate,
            forward=forward,
            backward=[b - f for b, f in zip(backward, again, strict=True)],
            latency=candidate.latency,
            hop=self._hops(candidate),
            recompute=candidate.recompute,
        )
        memory = max(self._memory(candidate, simulation.held))
        if memory > self.cluster.memory:
            return None
        update = candidate.accumulate / simulation.throughput + self._averaging(candidate)
        cut = self.cut(candidate.stages)
        return Choice(candidate, cut, self.samples / update, memory, simulation)

    def cut(self, stages: int) -> list[int]:
        """Return the sizes of so many stages, balanced by time."""
        if stages not in self._cuts:
            self._cuts[stages] = cut_evenly(self.units.seconds, stages)
        return self._cuts[stages]

    def _times(self, candidate: Candidate) -> tuple[list[float], list[float]]:
        """Return the seconds of forwards and backwards of the stages."""
        sizes = self.cut(candidate.stages)
        forward = [
            candidate.microbatch * load + self.cluster.overhead * size
            for load, size in zip(loads_of(self.units.seconds, sizes), sizes, strict=True)
        ]
        factor = 3 if candidate.method == "petra" or candidate.recompute else 2
        return forward, [factor * time for time in forward]

    def _inputs(self, candidate: Candidate) -> list[int]:
        """Return the bytes of the inputs of the stages."""
        ends = accumulate(self.cut(candidate.stages))
        outputs = [self.units.output[end - 1] for end in ends]
        return [candidate.microbatch * size for size in (self.units.kept[0], *outputs[:-1])]

    def _hops(self, candidate: Candidate) -> list[float]:
        """Return the seconds of transfers between stages, the mean of up and down."""
        # Down go gradients, and with PETRA also the streams that a stage has rebuilt.
        share = 1.5 if candidate.method == "petra" else 1.0
        sizes = self._inputs(candidate)[1:]
        return [self.cluster.delay + share * size / self.cluster.bandwidth for size in sizes]

    def _averaging(self, candidate: Candidate) -> float:
        """Return the seconds in which replicas average the gradients of an update."""
        if candidate.replicas == 1:
            return 0.0
        most = max(loads_of(self.units.weights, self.cut(candidate.stages)))
        share = 2 * (candidate.replicas - 1) / candidate.replicas
        return share * most / self.cluster.bandwidth + 2 * self.cluster.delay

    def _memory(self, candidate: Candidate, held: list[float]) -> list[float]:
        """Return the bytes of every device for the micro-batches that it holds."""
        sizes, inputs = self.cut(candidate.stages), self._inputs(candidate)
        loads = (self.units.weights, self.units.kept, self.units.graph)
        weights, kept, graph = (loads_of(values, sizes) for values in loads)
        schedule = Schedule(candidate.stages, candidate.latency)
        total = []
        for j, (own, num) in enumerate(zip(weights, held, strict=True)):
            used = STATE * own
            if candidate.method == "petra":
                start = sum(sizes[:j])
                used += candidate.microbatch * num * kept[j]
                used += candidate.microbatch * max(self.units.graph[start : start + sizes[j]])
            elif candidate.method == "delayed-graph":
                used += ceil(schedule.delay(j) / candidate.accumulate) * own  # old weights
                used += candidate.microbatch * (num + 1) * graph[j]
            elif candidate.recompute:
                used += num * inputs[j] + candidate.microbatch * graph[j]
            else:
                used += candidate.microbatch * num * graph[j]
            if candidate.method in OURS:
                above = inputs[j + 1] if j + 1 < len(inputs) else 0
                used += schedule.num_waiting("up", j) * inputs[j]
                used += (
                    schedule.num_waiting("down", j) * above * (1 + (candidate.method == "petra"))
                )
            total.append(used)
        return total


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
