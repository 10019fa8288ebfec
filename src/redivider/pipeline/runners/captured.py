"""A steady pipeline as captured ticks, with a branch for each stage: all at once on one GPU.

Within a tick no stage reads what another one does in it, and a stage's forward nothing that its
backward does, so each of these is a branch of its own. A steady pipeline repeats itself after a few
ticks, its phases: as many as `accumulate` needs. Each phase is one graph, recorded by running the
lockstep tick once:

    phase 0  reads what lies still, writes to its own memory
    phase 1  reads that, writes to its own
    phase 2  reads that, writes to its own, and copies it to what lies still
    phase 0  ...

The more phases, the fewer copies, and the more memory.

What goes on between ticks lives in graph memory meanwhile, so `leave` brings it back for whatever
is not a steady tick: a flush, a state, an input of another shape.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from redivider.mailbox import Mailbox
from redivider.pipeline.runners.capturable import Settings, look_of
from redivider.pipeline.runners.control import Control
from redivider.pipeline.runners.cuda_graphs import Graphs
from redivider.pipeline.runners.recording import NONE, Recording
from redivider.pipeline.runners.tick_state import Carried
from redivider.pipeline.schedule import delay
from redivider.pipeline.stages.fused_optimizer import has_hooks
from redivider.pipeline.stages.ring_buffer import Ring
from redivider.pipeline.stages.stage import Message, Stage
from redivider.pipeline.stages.unit import Flow, Kept, Unit
from redivider.replay.autocast import Autocast
from redivider.replay.random import captured_from, replayed_from
from redivider.replay.statistics import counted_later

logger = logging.getLogger("redivider")

NUM_STEADY = 2  # ticks of a steady pipeline before it is recorded: libraries warm up
NUM_UNHEARD = 16  # ticks between two looks at whether a loss was not a number
NUM_PHASES = 8  # at least, where memory allows it: each has its own for messages
PART_FOR_PHASES = 1 / 32  # of a GPU's memory


@dataclass
class Phase:
    """A recorded tick: what replays it, and where the graph leaves what the next one reads."""

    replay: Callable[[], None]
    loss: Tensor
    aux: Any
    entering: int
    """The micro-batch that entered while it was recorded."""
    updates: list[Stage]
    num_ahead: list[int]
    """The updates that each stage looks ahead."""
    draws_on: torch.device | None
    """Where random numbers are drawn, if any are."""
    carried: Carried


def num_phases(accumulate: int, nbytes: int, device: torch.device) -> int:
    """Ticks to record, where so many bytes go on from each to the next.

    The more they are, the less often those bytes are copied, and the more memory they take. Two at
    least: a flag that one sets is read by the next.
    """
    most = ceil(NUM_PHASES / accumulate)
    if device.type == "cuda":
        memory = PART_FOR_PHASES * torch.cuda.get_device_properties(device).total_memory
        most = min(most, int(memory / (accumulate * nbytes)))
    return accumulate * max(most, ceil(2 / accumulate))


class Concurrent:
    """Runs a pipeline's steady ticks by graphs.

    Args:
        pipe: The pipeline.
        make_graphs: Makes what records, for so many lanes.
    """

    def __init__(self, pipe: Any, make_graphs: Callable[[int], Graphs]) -> None:
        self._pipe = pipe
        self._make_graphs = make_graphs
        self._phases: list[Phase] = []
        self._next = 0
        self._looks: Any = None  # of the last inputs
        self._num_alike = 0
        # All that is in flight must be alike, and a steady tick must have run.
        self._num_needed = delay(0, len(pipe.stages), pipe.latency) + NUM_STEADY
        self._settings = Settings(pipe)
        self._mailbox = Mailbox()
        self.is_active = False
        self._is_refused = False

    def step(self, x: Any, target: Any, side: dict[str, Any]) -> tuple[int, Tensor, Any] | None:
        """Run a tick by a graph; None if it must be run in lockstep."""
        inputs = (x, target, side)
        looks = look_of(inputs), self._settings.now()
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
                if not self._try_to_record(inputs):
                    return None
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
        device = self._control.device
        for stage, unit in self._units():
            like = self._like[unit]
            last = entered - pipe.latency * stage.index
            first = last - delay(stage.index, len(pipe.stages), pipe.latency) + 1
            ring, unit.ring = unit.ring, None
            unit.kept = {
                n: unit.revive(like, n, device, ring.get(n) if ring else None)
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
        # The first step of an optimizer makes its state, and the second one may be compiled.
        updated = all(each.num_updates > 1 for each in pipe.stages if each.optimizer is not None)
        return full and updated and pipe._probe is None and pipe.observer is None

    def _refuses(self) -> bool:
        """Whether there is something in a tick that a replay would not do."""
        moving = [unit.name for _, unit in self._units() if unit.changes_buffers]
        hooked = [stage for stage in self._pipe.stages if has_hooks(stage.optimizer)]
        if moving and not self._is_refused:
            self._refuse(f"{moving[0]} changes its buffers")
        if hooked and not self._is_refused:
            self._refuse(f"the optimizer of stage {hooked[0].index} has hooks, which would not run")
        return self._is_refused

    def _refuse(self, why: str) -> None:
        self._is_refused = True
        logger.warning("ticks are not captured, and slower for it: %s", why)

    def _try_to_record(self, inputs: Any) -> bool:
        """Record a cycle of phases, unless something in them cannot be: then ticks stay eager."""
        try:
            self._follow_weights()
            self._record(inputs)
        except Exception as error:
            self._phases = []
            said = str(error).partition("\n")[0]
            where = " ".join(getattr(error, "__notes__", []))
            self._refuse(f"recording one failed: {said} {where}".rstrip())
            return False
        return True

    def _follow_weights(self) -> None:
        """Cast again what somebody else has changed."""
        for _, unit in self._units():
            for each in unit.weights.casts.values():
                each.follow()

    def _record(self, inputs: Any) -> None:
        pipe = self._pipe
        entering = pipe._first + pipe._entered
        device = next(each for each in tree_leaves(inputs) if isinstance(each, Tensor)).device
        self._inputs = tree_map_only(Tensor, lambda each: each.detach().clone(), inputs)
        self._recorded_looks = self._looks
        self._autocast = Autocast(device)
        keeping = [(s, unit) for s, unit in self._units() if unit.keep == "input" and unit.kept]
        self._control = Control(pipe, device, len(keeping))
        self._num_phases = num_phases(pipe.accumulate, Carried.of(pipe).nbytes, device)
        # Memory of graphs that are gone cannot be given to others.
        self._graphs = self._make_graphs(2 * len(pipe.stages))
        self._recording = Recording(
            self._graphs, len(pipe.stages), self._num_phases, self._control.microbatch
        )
        self._pending = [stage.num_pending for stage in pipe.stages]
        self._rings = {
            unit: (stage, Ring([k.value for k in unit.kept.values()], min(unit.kept), where))
            for (stage, unit), where in zip(keeping, self._control.slots, strict=True)
        }
        with self._host_unchanged(), self._control.giving_coefficients():
            start = Carried.of(pipe).cloned()  # what a cycle begins with lies still
            start.give_to(pipe)
            for unit, (_, ring) in self._rings.items():
                unit.ring = ring
            for number in range(self._num_phases):
                self._phases.append(self._record_phase(entering + number, start))
        last = self._phases[-1]
        last.carried = start
        # Its own messages bear the numbers of the cycle's beginning.
        last.entering = entering - 1

    def _numbers(self, entering: int) -> list[int]:
        """What a tick needs to know: the micro-batch that meets its loss, and slots of rings."""
        pipe, last = self._pipe, len(self._pipe.stages) - 1
        numbers = [entering - pipe.latency * last]
        for stage, ring in self._rings.values():
            forward, backward = stage.index, 2 * last - stage.index
            numbers += [ring.slot(entering - pipe.latency * each) for each in (forward, backward)]
        return numbers

    def _record_phase(self, entering: int, start: Carried) -> Phase:
        pipe = self._pipe
        before = [stage.num_updates for stage in pipe.stages]
        self._recording.phase = len(self._phases)
        num_ahead = [stage.num_ahead for stage in pipe.stages]
        for stage in pipe.stages:
            stage.forget_prediction()
            if stage.optimizer is not None:
                stage.optimizer.found_inf = self._recording.fault_seen_by(stage.index)

        drawn: list[torch.device] = []
        by_times: dict[int, list[Tensor]] = {}

        def run() -> Any:
            # They travel, and the next ones come to where these are.
            x, target, side = tree_map_only(Tensor, Tensor.clone, self._inputs)
            pipe._up[0][entering] = Message(entering, Flow(x), self._autocast, side, target)
            pipe._entered += 1
            self._graphs.fork()
            with counted_later() as counters, captured_from(self._oldest(entering)) as draws:
                tick = pipe._run_tick()
            drawn.extend(draws)
            self._graphs.join()
            for each, times in Counter(counters).items():  # one that units share is there twice
                by_times.setdefault(times, []).append(each)
            for times, some in by_times.items():
                torch._foreach_add_(some, times)
            if len(self._phases) == self._num_phases - 1:
                Carried.of(pipe).copy_to(start)
            return tick

        replay, tick = self._graphs.record(run)
        updates = [
            stage for stage, num in zip(pipe.stages, before, strict=True) if stage.num_updates > num
        ]
        carried, draws_on = Carried.of(pipe), drawn[0] if drawn else None
        return Phase(replay, tick.loss, tick.aux, entering, updates, num_ahead, draws_on, carried)

    def _enter(self) -> None:
        """Put everything in flight where the first phase reads it."""
        pipe = self._pipe
        self._like: dict[Unit, Kept | None] = {
            unit: next((replace(each, value=None) for each in unit.kept.values()), None)
            for _, unit in self._units()
        }
        Carried.of(pipe).copy_to(self._phases[-1].carried)
        for unit, (_, ring) in self._rings.items():
            ring.fill([each.value for each in unit.kept.values()], min(unit.kept))
            unit.ring = ring
        self._next = 0
        self.is_active = True

    def _replay(self, inputs: Any) -> tuple[int, Tensor, Any]:
        pipe, phase = self._pipe, self._phases[self._next]
        for static, each in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
            if isinstance(each, Tensor):
                static.copy_(each.detach(), non_blocking=True)
        entering = pipe._first + pipe._entered
        numbers = self._numbers(entering)
        self._control.send(numbers, phase.updates, phase.num_ahead)
        self._follow_weights()
        with replayed_from(self._oldest(entering), pipe.seed, phase.draws_on):
            phase.replay()
        pipe._tick += 1
        pipe._entered += 1
        for stage in pipe.stages:
            stage.num_pending += 1
        for stage in phase.updates:
            stage.num_pending = 0
            stage.num_updates += 1
        self._next = (self._next + 1) % self._num_phases
        self._listen(wait=False)
        return numbers[0], phase.loss.clone(), tree_map_only(Tensor, Tensor.clone, phase.aux)

    def _listen(self, *, wait: bool) -> None:
        """Hear, now and then, whether a loss was not a number."""

        def read(microbatch: Tensor) -> None:
            if int(microbatch) < NONE:
                raise FloatingPointError(
                    f"the loss of micro-batch {int(microbatch)} is not a number; no update was "
                    "done with it, and none after it"
                )

        if wait:
            read(self._recording.first_bad)
        elif self._pipe._tick % NUM_UNHEARD == 0:
            self._mailbox.post(self._recording.first_bad, read)
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
        try:
            yield
        finally:
            pipe._around, pipe._stopped = around, None
            for stage in pipe.stages:
                stage.forget_prediction()
            for each in optimizers:
                vars(each).pop("found_inf", None)
            pipe._tick, pipe._entered = counters
            carried.give_to(pipe)
            for stage, num_pending, num_updates in stages:
                stage.num_pending, stage.num_updates = num_pending, num_updates
            for unit, in_flight in kept:
                unit.kept, unit.ring = in_flight, None
                for each in unit.weights.casts.values():
                    each.distrust()  # an update that is recorded has cast nothing

    def _oldest(self, entering: int) -> int:
        """The micro-batch that the first stage takes back when this one enters."""
        return entering - delay(0, len(self._pipe.stages), self._pipe.latency)

    def _units(self) -> list[tuple[Stage, Unit]]:
        return [(stage, unit) for stage in self._pipe.stages for unit in stage.units]
