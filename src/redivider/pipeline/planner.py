"""Choice of a pipeline for some devices: the fastest that keeps limits on delay and memory.

Candidates are all divisions of the devices into replicas of J stages, of an update into
micro-batches, and all latencies. Each has an upper bound, its throughput if no device ever waited.
Candidates are simulated in the order of their bounds, until no bound is above the best result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil, inf, isqrt, log2

from redivider.pipeline.balance import StageSizes, UnitBytes
from redivider.pipeline.methods import resolve_method
from redivider.pipeline.partition import cut_evenly, loads_of
from redivider.pipeline.schedule import Schedule
from redivider.pipeline.simulate import LATENCIES as SYNCHRONOUS
from redivider.pipeline.simulate import Simulation, simulate

TICKS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Latencies of the candidates."""
METHODS = ("petra", "delayed-graph", "1f1b", "zero-bubble")
OURS = ("petra", "delayed-graph")
STATE = 4
"""Copies of the weights in memory: weights, gradients and two moments of Adam."""


@dataclass(frozen=True)
class UnitCosts:
    """Costs of every unit of a model."""

    seconds: tuple[float, ...]
    """Seconds of a forward of a sample. A backward takes twice as long, and another forward to
    recompute."""
    bytes: tuple[UnitBytes, ...]
    """Bytes for a batch."""
    batch: int = 1
    """Samples of that batch."""


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
        for candidate in sorted(self.candidates(method), key=self.bound, reverse=True):
            # Ranks compare six digits of throughput, so a bound just below may still be as good.
            if best is not None and self.bound(candidate) < (1 - 1e-6) * best.throughput:
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
        forwards = 4 if candidate.recompute or candidate.method == "petra" else 3
        slowest = forwards * max(self._forward(candidate))
        return candidate.replicas * candidate.microbatch / slowest

    def evaluate(self, candidate: Candidate) -> Choice | None:
        """Simulate a candidate; return None if it needs too much memory."""
        forward = self._forward(candidate)
        own = 3 if candidate.method == "petra" else 2  # with what PETRA computes again
        simulation = simulate(
            candidate.method,
            candidate.stages,
            candidate.accumulate,
            forward=forward,
            backward=[own * time for time in forward],
            latency=candidate.latency,
            hop=self._hops(candidate),
            recompute=candidate.recompute,
        )
        memory = max(self.memory(candidate, simulation.held))
        if memory > self.cluster.memory:
            return None
        update = candidate.accumulate / simulation.throughput + self._averaging(candidate)
        cut = self.cut(candidate.stages)
        return Choice(candidate, cut, self.samples / update, memory, simulation)

    def memory(self, candidate: Candidate, held: list[float]) -> list[float]:
        """Return the bytes of every device.

        Args:
            candidate: The setting.
            held: Micro-batches that a synchronous method holds in every stage.
        """
        is_ours = candidate.method in OURS
        sizes = StageSizes(
            self._units(candidate),
            resolve_method(candidate.method if is_ours else "delayed-graph"),
            Schedule(candidate.stages, candidate.latency),
            candidate.accumulate,
            STATE,
        )
        places = self._places(candidate)
        if is_ours:
            return [sizes(j, start, end) for j, (start, end) in enumerate(places)]
        return [
            sizes.synchronous(start, end, num, recompute=candidate.recompute)
            for (start, end), num in zip(places, held, strict=True)
        ]

    def cut(self, stages: int) -> list[int]:
        """Return the sizes of so many stages, balanced by time."""
        if stages not in self._cuts:
            self._cuts[stages] = cut_evenly(self.units.seconds, stages)
        return self._cuts[stages]

    def _forward(self, candidate: Candidate) -> list[float]:
        """Return the seconds of forwards of the stages."""
        sizes = self.cut(candidate.stages)
        return [
            candidate.microbatch * load + self.cluster.overhead * size
            for load, size in zip(loads_of(self.units.seconds, sizes), sizes, strict=True)
        ]

    def _places(self, candidate: Candidate) -> list[tuple[int, int]]:
        """Return the first unit of every stage, and the one above its last."""
        return list(pairwise(accumulate(self.cut(candidate.stages), initial=0)))

    def _units(self, candidate: Candidate) -> list[UnitBytes]:
        factor = candidate.microbatch / self.units.batch
        return [unit.scaled(factor) for unit in self.units.bytes]

    def _hops(self, candidate: Candidate) -> list[float]:
        """Return the seconds of transfers between stages, the mean of up and down."""
        units, hops = self._units(candidate), []
        for _, end in self._places(candidate)[:-1]:
            # Down go gradients, and with PETRA also the streams that a coupling has rebuilt.
            rebuilds = candidate.method == "petra" and units[end - 1].couples
            share = 1.5 if rebuilds else 1.0
            size = share * units[end - 1].output
            hops.append(self.cluster.delay + size / self.cluster.bandwidth)
        return hops

    def _averaging(self, candidate: Candidate) -> float:
        """Return the seconds in which replicas average the gradients of an update.

        Gloo sends them around a ring. NCCL also has trees, of fewer steps with more bytes, and
        takes what is faster.
        """
        num = candidate.replicas
        trained = [unit.trained for unit in self.units.bytes]
        most = max(loads_of(trained, self.cut(candidate.stages)))
        ring = 2 * (num - 1) * (self.cluster.delay + most / num / self.cluster.bandwidth)
        depth = 2 * ceil(log2(num))
        tree = depth * self.cluster.delay + 2 * most / self.cluster.bandwidth
        return min(ring, tree) if num > 1 else 0.0


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})
