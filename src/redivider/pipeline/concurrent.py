"""A steady pipeline as captured ticks, with a branch for each stage: all at once on one GPU.

Within a tick no stage reads what another one does in it, so each is a branch of its own. A steady
pipeline repeats itself after a few ticks, its phases: as many as `accumulate` needs, and two for
the buffers. Each phase is one graph, recorded by running the lockstep tick once:

    phase 0  reads what lies still, writes to its own memory
    phase 1  reads that, writes to its own, and copies it to what lies still
    phase 0  ...

What goes on between ticks lives in graph memory meanwhile, so `leave` brings it back for whatever
is not a steady tick: a flush, a state, an input of another shape.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from redivider.mailbox import Mailbox
from redivider.pipeline.carried import Carried
from redivider.pipeline.graphs import Graphs
from redivider.pipeline.recording import Recording
from redivider.pipeline.ring import Ring
from redivider.pipeline.stage import Message, Stage
from redivider.pipeline.tick import delay
from redivider.pipeline.unit import Flow, Kept, Unit
from redivider.replay.autocast import Autocast
from redivider.replay.random import captured_from, replayed_from

logger = logging.getLogger("redivider")

NUM_STEADY = 2  # ticks of a steady pipeline before it is recorded: libraries warm up
NUM_UNHEARD = 16  # ticks between two looks at whether a loss was not a number


@dataclass
class Phase:
    """A recorded tick: what replays it, and where the graph leaves what the next one reads."""

    replay: Callable[[], None]
    loss: Tensor
    aux: Any
    entering: int
    """The micro-batch that entered while it was recorded."""
    updates: list[Stage]
    carried: Carried


def reason_against(pipe: Any) -> str | None:
    """Why the ticks of a pipeline cannot be recorded, if they cannot."""
    if pipe.method.weights != "current":
        return f"{pipe.method.name} keeps old weights, whose number changes"
    if pipe.lookahead is not None:
        return "what lookahead predicts depends on the schedule, which the host knows"
    if pipe.arithmetic.exact:
        return "a stream that leaves its grid must stop the pipeline at once"
    if pipe._clip is not None:
        return "clipping asks the host for norms"
    for stage in pipe.stages:
        groups = stage.optimizer.param_groups if stage.optimizer is not None else []
        if not all(group.get("fused") for group in groups):
            kind = type(stage.optimizer).__name__
            return f"{kind} is not fused, and could not skip an update after a fault (fused=True)"
    return None


class Concurrent:
    """Runs a pipeline's steady ticks by graphs.

    Args:
        pipe: The pipeline.
        make_graphs: Makes what records, for so many lanes.
    """

    def __init__(self, pipe: Any, make_graphs: Callable[[int], Graphs]) -> None:
        self._pipe = pipe
        self._graphs = make_graphs(len(pipe.stages))
        self._num_phases = lcm(2, pipe.accumulate)
        self._phases: list[Phase] = []
        self._next = 0
        self._looks: Any = None  # of the last inputs
        self._num_alike = 0
        # All that is in flight must be alike, and a steady tick must have run.
        self._num_needed = delay(0, len(pipe.stages), pipe.latency) + NUM_STEADY
        self._mailbox = Mailbox()
        self.is_active = False
        self._is_refused = False

    def step(self, x: Any, target: Any, side: dict[str, Any]) -> tuple[int, Tensor, Any] | None:
        """Run a tick by a graph; None if it must be run in lockstep."""
        inputs = (x, target, side)
        looks = _look(inputs)
        if looks != self._looks or not self._is_steady():
            self.leave()
            self._looks, self._num_alike = looks, 0
            return None
        self._num_alike += 1
        if not self.is_active:
            if self._num_alike <= self._num_needed:
                return None
            if self._refuses():
                return None
            if not self._phases or self._looks != self._recorded_looks:
                self._phases = []
                self._record(inputs)
            elif [stage.num_pending for stage in self._pipe.stages] != self._pending:
                return None  # the phases begin where updates are due at other ticks
            self._enter()
        return self._replay(inputs)

    def leave(self) -> None:
        """Bring everything in flight back to where lockstep ticks look for it."""
        if not self.is_active:
            return
        self.is_active = False
        pipe, before = self._pipe, self._phases[self._next - 1]
        entered = pipe._first + pipe._entered - 1  # the last one
        before.carried.cloned(entered - before.entering).give_to(pipe)
        for stage, unit in self._units():
            like = self._like[unit]
            last = entered - pipe.latency * stage.index
            first = last - delay(stage.index, len(pipe.stages), pipe.latency) + 1
            ring, unit.ring = unit.ring, None
            unit.kept = {
                n: unit.revive(like, n, self._clock.device, ring.get(n) if ring else None)
                for n in range(first, last + 1)
                if like is not None
            }
        self._listen(wait=True)

    def forget(self) -> None:
        """Drop all graphs, as when a state is loaded."""
        self.is_active = False
        self._phases, self._num_alike = [], 0
        for _, unit in self._units():
            unit.ring = None

    def _is_steady(self) -> bool:
        pipe = self._pipe
        full = pipe._tick >= delay(0, len(pipe.stages), pipe.latency)
        # The first step of an optimizer is another than the next ones: it makes its state.
        updated = all(each.num_updates > 0 for each in pipe.stages if each.optimizer is not None)
        return full and updated and pipe._probe is None and pipe.observer is None

    def _refuses(self) -> bool:
        """Whether a unit keeps old buffers for what is in flight, which nothing would replay."""
        moving = [unit.name for _, unit in self._units() if unit.changes_buffers]
        if moving and not self._is_refused:
            self._is_refused = True
            logger.info("ticks are not captured: %s changes its buffers", moving[0])
        return self._is_refused

    def _record(self, inputs: Any) -> None:
        pipe = self._pipe
        entering = pipe._first + pipe._entered
        device = next(each for each in tree_leaves(inputs) if isinstance(each, Tensor)).device
        self._inputs = tree_map_only(Tensor, lambda each: each.detach().clone(), inputs)
        self._recorded_looks = self._looks
        self._autocast = Autocast(device)
        self._clock = torch.tensor([entering], device=device)
        num_behind = pipe.latency * (len(pipe.stages) - 1)
        self._recording = Recording(self._graphs, self._clock, num_behind)
        self._pending = [stage.num_pending for stage in pipe.stages]
        self._like: dict[Unit, Kept | None] = {
            unit: next((replace(each, value=None) for each in unit.kept.values()), None)
            for _, unit in self._units()
        }
        self._rings = {
            unit: Ring([each.value for each in unit.kept.values()], min(unit.kept), self._clock)
            for _, unit in self._units()
            if unit.keep == "input" and unit.kept
        }
        self._put_rates_on(device)
        with self._host_unchanged():
            start = Carried.of(pipe).cloned()  # what a cycle begins with lies still
            start.give_to(pipe)
            for unit, ring in self._rings.items():
                unit.ring = ring
            for number in range(self._num_phases):
                self._phases.append(self._record_phase(entering + number, start))
        last = self._phases[-1]
        last.carried = start
        # Its own messages bear the numbers of the cycle's beginning.
        last.entering = entering - 1

    def _put_rates_on(self, device: torch.device) -> None:
        """Let learning rates be tensors, which the host can fill between replays."""
        for stage in self._pipe.stages:
            for group in stage.optimizer.param_groups if stage.optimizer is not None else ():
                if not isinstance(group["lr"], Tensor):
                    stage.set_rate(self._pipe._factor(max(0, stage.num_updates - 1)))
                    dtype = torch.promote_types(group["params"][0].dtype, torch.float32)
                    group["lr"] = torch.tensor(group["lr"], dtype=dtype, device=device)

    def _record_phase(self, entering: int, start: Carried) -> Phase:
        pipe = self._pipe
        for ring in self._rings.values():
            ring.entering = entering
        before = [stage.num_updates for stage in pipe.stages]

        def run() -> Any:
            x, target, side = self._inputs
            target, side = tree_map_only(Tensor, Tensor.clone, (target, side))  # they travel
            pipe._up[0][entering] = Message(entering, Flow(x), self._autocast, side, target)
            pipe._entered += 1
            self._graphs.fork()
            with captured_from(self._oldest(entering)):
                tick = pipe._run_tick()
            self._graphs.join()
            self._recording.end_tick()
            if len(self._phases) == self._num_phases - 1:
                Carried.of(pipe).copy_to(start)
            return tick

        replay, tick = self._graphs.record(run)
        updates = [
            stage for stage, num in zip(pipe.stages, before, strict=True) if stage.num_updates > num
        ]
        return Phase(replay, tick.loss, tick.aux, entering, updates, Carried.of(pipe))

    def _enter(self) -> None:
        """Put everything in flight where the first phase reads it."""
        pipe = self._pipe
        Carried.of(pipe).copy_to(self._phases[-1].carried)
        for unit, ring in self._rings.items():
            ring.fill([each.value for each in unit.kept.values()], min(unit.kept))
            unit.ring = ring
        self._clock.fill_(pipe._first + pipe._entered)
        self._next = 0
        self.is_active = True

    def _replay(self, inputs: Any) -> tuple[int, Tensor, Any]:
        pipe, phase = self._pipe, self._phases[self._next]
        for static, each in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
            if isinstance(each, Tensor):
                static.copy_(each, non_blocking=True)
        for stage in phase.updates:
            stage.set_rate(pipe._factor(stage.num_updates))
        oldest = self._oldest(pipe._first + pipe._entered)
        with replayed_from(oldest, pipe.seed, self._clock.device):
            phase.replay()
        n = pipe._first + pipe._entered - pipe.latency * (len(pipe.stages) - 1)
        pipe._tick += 1
        pipe._entered += 1
        for stage in pipe.stages:
            stage.num_pending += 1
        for stage in phase.updates:
            stage.num_pending = 0
            stage.num_updates += 1
        self._next = (self._next + 1) % self._num_phases
        self._listen(wait=False)
        return n, phase.loss.clone(), tree_map_only(Tensor, Tensor.clone, phase.aux)

    def _listen(self, *, wait: bool) -> None:
        """Hear, now and then, whether a loss was not a number."""

        def read(microbatch: Tensor) -> None:
            if int(microbatch) >= 0:
                raise FloatingPointError(
                    f"the loss of micro-batch {int(microbatch)} is not a number; no update was "
                    "done with it, and none after it"
                )

        if wait:
            read(self._recording.microbatch)
        elif self._pipe._tick % NUM_UNHEARD == 0:
            self._mailbox.post(self._recording.microbatch, read)
        self._mailbox.poll()

    @contextmanager
    def _host_unchanged(self) -> Iterator[None]:
        """Put back all that the host counts and holds: a tick that is recorded does not happen."""
        pipe = self._pipe
        counters = pipe._tick, pipe._entered
        carried = Carried.of(pipe)
        stages = [(each, each.num_pending, each.num_updates) for each in pipe.stages]
        kept = [(unit, dict(unit.kept)) for _, unit in self._units()]
        optimizers = [each.optimizer for each in pipe.stages if each.optimizer is not None]
        pipe._around, around = self._recording, pipe._around
        last = pipe.stages[-1].optimizer
        for each in optimizers:
            recording = self._recording
            each.found_inf = recording.new_fault if each is last else recording.fault
        try:
            yield
        finally:
            pipe._around = around
            for each in optimizers:
                del each.found_inf
            pipe._tick, pipe._entered = counters
            carried.give_to(pipe)
            for stage, num_pending, num_updates in stages:
                stage.num_pending, stage.num_updates = num_pending, num_updates
            for unit, in_flight in kept:
                unit.kept, unit.ring = in_flight, None

    def _oldest(self, entering: int) -> int:
        """The micro-batch that the first stage takes back when this one enters."""
        return entering - delay(0, len(self._pipe.stages), self._pipe.latency)

    def _units(self) -> list[tuple[Stage, Unit]]:
        return [(stage, unit) for stage in self._pipe.stages for unit in stage.units]


def _look(inputs: Any) -> Any:
    """What inputs must have in common to be run by the same graphs."""
    leaves, spec = tree_flatten(inputs)
    looks = [
        (each.shape, each.dtype, each.device) if isinstance(each, Tensor) else each
        for each in leaves
    ]
    devices = {each.device for each in leaves if isinstance(each, Tensor)}
    autocast = [Autocast(device).settings for device in sorted(devices, key=str)]
    return spec, looks, autocast, torch.is_inference_mode_enabled()
