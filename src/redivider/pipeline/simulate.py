"""Simulation of a pipeline: its schedule, run with times instead of tensors. No torch here.

Our methods and 1F1B execute a `Schedule`; simulation/waves.py has the orders of other methods, and
simulation/clock.py runs them.

The steady state of our methods is computed and not replayed. A cycle of waits goes up from stage a
to stage b by forwards, and down again by backwards. It spans `sum of h + 1` ticks, where h are the
slots that a message travels from stage to stage. With forwards F, backwards B and hops c, a tick
takes

    max over a <= b of (sum of F + sum of B + 2 sum of c) / (sum of h + 1)

where backwards above stage a count until they send, which at a latency of 0.5 is before they
compute the gradients of weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate as sums
from itertools import cycle
from math import inf
from numbers import Integral, Real
from random import Random
from statistics import fmean
from typing import Any, TypeAlias

from redivider.errors import not_one_of
from redivider.pipeline.diagnostics.timeline import Spans, Timeline, draw_spans
from redivider.pipeline.schedule import Schedule, resolve_latency, verify_latency
from redivider.pipeline.simulation.clock import Clock, Costs
from redivider.pipeline.simulation.waves import (
    CHUNKS,
    Wave,
    gpipe_waves,
    interleaved_waves,
    schedule_waves,
)

ASYNCHRONOUS = ("petra", "dsp", "delayed", "delayed-graph", "exact-inverse", "approximate-input")
"""Methods of `rd.Pipeline`."""
LATENCIES = {"gpipe": 0.5, "1f1b": 0.5, "interleaved": 0.5, "zero-bubble": 0.5, "zero-bubble-h2": 1}
"""Synchronous methods, and the latency of the schedule in whose order they run one update."""
NUM_REPLAYED = 100_000  # actions in a replay with jitter, about
MIN_TICKS = 300
MAX_DRAWN = 10_000
"""Stages times micro-batches that a timeline has by default."""
MAX_TIME = 1e100
"""Time of an action, at most: sums of longer ones may overflow."""
Times: TypeAlias = float | Sequence[float]


@dataclass(frozen=True, repr=False)
class Simulation:
    """Prediction for a pipeline, made by `simulate`."""

    throughput: float
    """Micro-batches per unit of time, of all replicas together."""
    idle: float
    """Share of the time that devices wait, on average: in steady state, or in one update."""
    delay: list[int]
    """Backward passes of each stage between a micro-batch's forward and its backward."""
    held: list[float]
    """Micro-batches between forward and backward in each stage: after a tick, or at most."""
    late: float
    """Updates by which the gradient of the first stage is late."""
    _setting: "_Setting"

    def __repr__(self) -> str:
        return (
            f"Simulation({self._setting.method!r}, stages={len(self.delay)}, "
            f"throughput={self.throughput:.4g}, idle={self.idle:.4g}, late={self.late:.4g})"
        )

    def __str__(self) -> str:
        """Format a table."""
        rows = {
            "method": self._setting.method,
            "stages": f"{len(self.delay)}",
            "throughput": f"{self.throughput:.4g} micro-batches per unit of time",
            "idle": f"{self.idle:.1%}",
            "late": f"{self.late:.3g} updates (stage 0)",
            "held": f"{max(self.held):g} micro-batches (stage 0)",
        }
        return "\n".join(f"{name:<12}{text}" for name, text in rows.items())

    def timeline(self, num_microbatches: int | None = None) -> Timeline:
        """Return start and end of the actions of the first micro-batches.

        Args:
            num_microbatches: Number of micro-batches, at most those of an update for synchronous
                methods; by default those of an update, or for methods of ours as many as fill the
                pipeline twice. Large pipelines draw fewer by default.
        """
        setting = self._setting
        most = setting.num if setting.is_synchronous else inf
        if num_microbatches is None:
            own = most if setting.is_synchronous else 2 * setting.schedule.num_in_flight + 2
            num_microbatches = int(min(own, max(16, MAX_DRAWN // len(self.delay))))
        _verify_count("num_microbatches", num_microbatches)
        if num_microbatches > most:
            raise ValueError(f"an update has {most} micro-batches, got {num_microbatches}")
        # An update in full: its first micro-batches are not those of a smaller one.
        ran = setting if setting.is_synchronous else replace(setting, num=num_microbatches)
        spans: Spans = {}
        clock = setting.clock(setting.factors(), spans, num_microbatches)
        clock.run(ran.waves())
        clock.finish()
        return Timeline(draw_spans(spans), spans, "time")


def simulate(
    method: str = "petra",
    stages: int = 8,
    accumulate: int = 8,
    forward: Times = 1.0,
    backward: Times = 2.0,
    latency: float | Sequence[float] = 1,
    hop: Times = 0.0,
    jitter: float = 0.0,
    replicas: int = 1,
    recompute: bool = False,
    rendezvous: bool = False,
) -> Simulation:
    """Predict throughput, idle time, delay and memory of a pipeline with a stage per device.

        rd.simulate(stages=64, accumulate=64, latency=0.5).throughput
        rd.simulate("1f1b", stages=64, accumulate=64, hop=0.1).idle
        print(rd.simulate("zero-bubble", stages=4).timeline())

    Times are numbers, or lists with one number per stage, in any unit. Updates take no time.

    What a method of ours computes again is part of `backward`, and what a synchronous method
    computes again is not. The same stage, with a forward of 1 and a backward of 2, is

        rd.simulate("petra", forward=1, backward=3)
        rd.simulate("delayed-graph", forward=1, backward=2)  # keeps all activations
        rd.simulate("1f1b", forward=1, backward=2)  # keeps all activations
        rd.simulate("1f1b", forward=1, backward=2, recompute=True)

    Args:
        method: A method of `rd.Pipeline`, or "gpipe", "1f1b", "interleaved" (two stages per
            device), "zero-bubble" (ZB-H1, with the memory of 1F1B) or "zero-bubble-h2".
        stages: Number of devices.
        accumulate: Micro-batches of an update.
        forward: Time of a forward.
        backward: Time of a backward. For methods of `rd.Pipeline` it includes what they compute
            again: by default PETRA recomputes in 1 and computes gradients in 1.
        latency: Ticks that a message travels, as for `rd.Pipeline`. Synchronous methods ignore it.
        hop: Time of a transfer between neighbouring devices; a list has one number per link.
        jitter: Standard deviation of the time of an action, as a part of it, at most 1. Negative
            times count as 0, which makes a deviation of 1 one of 0.8.
        replicas: Number of pipelines that wait for each other at every update.
        recompute: Whether a synchronous method computes the forward again before every backward.
        rendezvous: Whether a message leaves only after the receiver's request for it has arrived,
            as over gloo. torch.distributed.pipelining requests a message when it needs it, so that
            it comes two hops later at the earliest. A full `DistributedPipeline` requests it early
            enough to lose nothing.
    """
    is_synchronous = method in LATENCIES
    _verify(method, stages, accumulate, latency, jitter, replicas, recompute)
    forwards = _per_stage("forward", forward, stages, "stage")
    backwards = _per_stage("backward", backward, stages, "stage")
    for stage, (f, b) in enumerate(zip(forwards, backwards, strict=True)):
        if f + b < 1 / MAX_TIME:
            raise ValueError(f"forward and backward of stage {stage} must take time, got {f} + {b}")
    hops = _per_stage("hop", hop, stages - 1, "link")
    schedule = Schedule(stages, resolve_latency(LATENCIES.get(method, latency), stages))
    costs = _split(method, schedule, forwards, backwards, hops, recompute)
    setting = _Setting(method, schedule, accumulate, costs, jitter, replicas, rendezvous)
    if is_synchronous:
        period, idle = setting.run_updates()
        delay, held = [0] * stages, setting.held()
        throughput = accumulate * replicas / period
    else:
        period, idle = setting.replay() if jitter else setting.steady()
        delay = [schedule.delay(stage) for stage in range(stages)]
        held = [float(schedule.num_kept(stage)) for stage in range(stages)]
        throughput = replicas / period
    return Simulation(throughput, idle, delay, held, delay[0] / accumulate, setting)


@dataclass(frozen=True)
class _Setting:
    """Everything that decides when an action runs."""

    method: str
    schedule: Schedule
    num: int
    """Micro-batches of an update."""
    costs: Costs
    jitter: float
    replicas: int
    rendezvous: bool = False

    @property
    def is_synchronous(self) -> bool:
        return self.method in LATENCIES

    def waves(self) -> Iterator[Wave]:
        """Return the actions of `num` micro-batches that enter an empty pipeline."""
        if self.method == "gpipe":
            return gpipe_waves(self.schedule.num_stages, self.num)
        if self.method == "interleaved":
            return interleaved_waves(self.schedule.num_stages, self.num)
        return schedule_waves(self.schedule, self.num)

    def clock(
        self,
        factors: Iterator[float] | None,
        spans: Spans | None = None,
        num_recorded: float = inf,
    ) -> Clock:
        """Return a clock of devices that have not begun."""
        on_request = self.rendezvous and self.is_synchronous
        return Clock(self.costs, factors, spans, on_request, num_recorded)

    def factors(self, seed: int = 0) -> Iterator[float] | None:
        """Return factors for the times of actions; their mean is 1."""
        return cycle(_draw_factors(self.jitter, seed)) if self.jitter else None

    def steady(self) -> tuple[float, float]:
        """Return the time of a tick in steady state, and the share of it that is idle."""
        costs, num, whole = self.costs, self.schedule.num_stages, self.costs.whole
        slots = [self.schedule.delay(0) - self.schedule.delay(stage) for stage in range(num)]
        # Times from stage 0 up to a stage; those of a cycle from a to b are a difference of two.
        steps = [0.0, *costs.hop]
        ups = list(
            sums(
                2 * c + f + b for c, f, b in zip(steps, costs.forward, costs.backward, strict=True)
            )
        )
        tick = 0.0
        for a in range(num):
            first, own = ups[a] - whole[a], slots[a] - 1
            slowest = max((ups[b] - first) / (slots[b] - own) for b in range(a, num))
            tick = max(tick, slowest)
        return tick, max(0.0, 1.0 - fmean(whole) / tick)

    def replay(self) -> tuple[float, float]:
        """Return the mean time of a tick, and the share of it that is idle.

        Fast devices may run ahead of slow ones for longer than the replay lasts. So a tick takes at
        least what it takes without jitter.
        """
        schedule, num_stages = self.schedule, self.schedule.num_stages
        num_full = schedule.num_in_flight + MIN_TICKS
        num_ticks = max(MIN_TICKS, NUM_REPLAYED // (2 * num_stages * self.replicas))
        clocks = [self.clock(self.factors(seed)) for seed in range(self.replicas)]
        counts = [0] * num_stages
        seen = []
        for ticks in (range(num_full), range(num_full, num_full + num_ticks)):
            slots = range(2 * ticks.start, 2 * ticks.stop)
            for wave in schedule_waves(schedule, ticks.stop, slots):
                for clock in clocks:
                    clock.run([wave])
                if wave[0] == "B" and self.replicas > 1:
                    self._wait_for_replicas(clocks, wave[1], counts)
            seen.append((_totals(c.free for c in clocks), _totals(c.busy for c in clocks)))
        (free_0, busy_0), (free_1, busy_1) = seen
        shares = [(busy_1[j] - busy_0[j]) / (free_1[j] - free_0[j]) for j in range(num_stages)]
        # From shares, because the mean of drawn times is not quite that of the costs.
        ticks_of = [own / share for own, share in zip(self.costs.whole, shares, strict=True)]
        # The longest of them would be too long by chance.
        tick = max(self.steady()[0], fmean(ticks_of))
        return tick, max(0.0, 1.0 - fmean(self.costs.whole) / tick)

    def _wait_for_replicas(
        self, clocks: Sequence[Clock], stages: Sequence[int], counts: list[int]
    ) -> None:
        """Let the replicas of stages that update wait for the slowest of them."""
        for stage in stages:
            counts[stage] += 1
            if counts[stage] % self.num == 0:
                latest = max(clock.free[stage] for clock in clocks)
                for clock in clocks:
                    clock.free[stage] = latest

    def run_updates(self) -> tuple[float, float]:
        """Return the time of a synchronous update, and the share of it that is idle.

        Devices begin the next update as soon as they have finished their own part, so an update
        takes as long as the device that needs longest from its first action to its last.
        """
        num_actions = 2 * len(self.costs.forward) * self.num
        rounds, replicas = 1, 1
        if self.jitter:
            replicas = self.replicas
            rounds = max(5, NUM_REPLAYED // (num_actions * replicas))
        sources = [self.factors(seed) for seed in range(replicas)]
        elapsed = busy = 0.0
        for _ in range(rounds):
            clocks = [self.clock(factors) for factors in sources]
            for clock in clocks:
                clock.run(self.waves())
                clock.finish()
            spans = [
                end - begin for c in clocks for begin, end in zip(c.begin, c.free, strict=True)
            ]
            elapsed += max(spans)
            busy += fmean(time for clock in clocks for time in clock.busy)
        return elapsed / rounds, max(0.0, 1.0 - busy / elapsed)

    def held(self) -> list[float]:
        """Return the micro-batches that devices hold at most in a synchronous update."""
        num_stages, num = self.schedule.num_stages, self.num
        if self.method == "gpipe":
            return [float(num)] * num_stages
        advance = [self.schedule.delay(stage) for stage in range(num_stages)]
        if self.method == "interleaved":
            chunks = [2 * delay + (CHUNKS - 1) * num_stages + 1 for delay in advance]
            return [min(CHUNKS * num, most) / CHUNKS for most in chunks]
        late = self.costs.num_late
        return [float(min(num, own + 1 + more)) for own, more in zip(advance, late, strict=True)]


def _verify(
    method: str,
    stages: int,
    accumulate: int,
    latency: float | Sequence[float],
    jitter: Any,
    replicas: int,
    recompute: bool,
) -> None:
    """Refuse arguments of `simulate` that do not fit."""
    if method not in (*ASYNCHRONOUS, *LATENCIES):
        raise ValueError(not_one_of("method", method, [*ASYNCHRONOUS, *LATENCIES]))
    for name, count in (("stages", stages), ("accumulate", accumulate), ("replicas", replicas)):
        _verify_count(name, count)
    if not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be a number from 0 to 1, got {jitter!r}")
    verify_latency(latency)
    if recompute and method not in LATENCIES:
        raise ValueError(f"backward must include what {method} computes again; leave recompute out")
    if method == "interleaved" and accumulate % stages:
        raise ValueError(f"interleaved needs accumulate to be a multiple of {stages} stages")


def _verify_count(name: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {count!r}")


def _split(
    method: str,
    schedule: Schedule,
    forwards: list[float],
    backwards: list[float],
    hops: list[float],
    recompute: bool,
) -> Costs:
    """Return the costs of stages, with every backward split where it sends."""
    stages = schedule.num_stages
    # Time of the gradients of weights: half of what is not computed again.
    kept = method in LATENCIES or method == "delayed-graph"
    weights = [max(b if kept else b - f, 0.0) / 2 for f, b in zip(forwards, backwards, strict=True)]
    is_zero_bubble = method.startswith("zero-bubble")
    rest = [w if _sends_early(schedule, j, method) else 0.0 for j, w in enumerate(weights)]
    again = forwards if recompute else [0.0] * stages
    until_sent = [b + f - w for b, f, w in zip(backwards, again, rest, strict=True)]
    late = [schedule.delay(0) - schedule.delay(j) if is_zero_bubble else 0 for j in range(stages)]
    costs = Costs(forwards, until_sent, rest, hops, list(range(stages)), late)
    return _interleave(costs) if method == "interleaved" else costs


def _totals(times: Iterable[list[float]]) -> list[float]:
    return [sum(own) for own in zip(*times, strict=True)]


@lru_cache(8)
def _draw_factors(jitter: float, seed: int) -> list[float]:
    dice = Random(seed)
    drawn = [max(0.0, dice.gauss(1.0, jitter)) for _ in range(50_021)]
    mean = fmean(drawn)
    return [factor / mean for factor in drawn]


def _sends_early(schedule: Schedule, stage: int, method: str) -> bool:
    """Return whether a stage sends the gradient of its input before it computes its weights'."""
    if method in LATENCIES:
        return method.startswith("zero-bubble")
    return schedule.is_tight(stage)


def _interleave(costs: Costs) -> Costs:
    """Return the costs of two stages per device, each with half of its work."""
    num = len(costs.device)
    around = [max(costs.hop, default=0.0)]  # from the last device to the first: the slowest link
    return Costs(
        [time / CHUNKS for time in costs.forward] * CHUNKS,
        [time / CHUNKS for time in costs.backward] * CHUNKS,
        [0.0] * num * CHUNKS,
        costs.hop + (around + costs.hop) * (CHUNKS - 1),
        costs.device * CHUNKS,
        [0] * num * CHUNKS,
    )


def _per_stage(name: str, value: Any, num: int, what: str) -> list[float]:
    try:
        is_one = isinstance(value, Real)
        times = [float(value)] * num if is_one else [float(x) for x in value]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a number, or a list with one for every {what}, got {value!r}"
        ) from None
    if len(times) != num:
        raise ValueError(f"{name} has {len(times)} numbers; it needs one for every {what}: {num}")
    if not all(0 <= time < MAX_TIME for time in times):
        raise ValueError(
            f"{name} must be finite and not negative, and below {MAX_TIME:g}, got {value!r}"
        )
    return times
