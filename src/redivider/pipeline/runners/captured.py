"""Runner of captured ticks: a steady pipeline as CUDA graphs, with its stages side by side.

Time in a tick. With whole latencies no stage reads what another stage computes in the same tick,
and a stage's forward reads nothing that its backward computes. So each of them is a branch of the
graph. An update waits for both branches of its stage, which go first. With three stages and latency
1, when micro-batch n enters:

    main    copy inputs --+                                     +-- count batches
    lane 0                +-- stage 0: F n --------+            |
    lane 3                +-- stage 0: B n-4 ------+-- update --+
    lane 1                +-- stage 1: F n-1 ------+            |
    lane 4                +-- stage 1: B n-3 ------+-- update --+
    lane 5                +-- stage 2: F n-2, B n-2 -- update --+

Time over ticks. A steady pipeline does the same again every `accumulate` ticks. A cycle is a
multiple of that, and its ticks are the phases. Each phase is one graph, recorded by running the
eager tick once (`recording.Recording`). Over processes it is several graphs, between which messages
travel (`recorded_transport.Part`). Replays go round the cycle. With three phases:

    tick            t           t + 1       t + 2                    t + 3
    replays         phase 0     phase 1     phase 2                  phase 0     ...
    reads state     start       memory 0    memory 1                 start
    writes state    memory 0    memory 1    memory 2, then start     memory 0

Memory. A graph reads and writes the same addresses at every replay:

    memory                                written                       read
    inputs, learning rates                by the host before a replay   by every phase
    numbers of a tick                     by every phase, which counts  by every phase
    messages of other processes           by a transfer, or a copy      by one phase
    weights, optimizers, statistics       by every phase, in place      by every phase
    rings of kept inputs                  one slot a tick               one slot a tick
    tick state (messages, gradients):
        memory k                          by phase k                    by phase k + 1
        start                             by the last phase, a copy     by phase 0
    loss                                  by every phase, its own       by the host after a replay

The copy to `start` closes the cycle. More phases mean fewer copies, and more memory.

Before anything else than a steady tick (a flush, a saved state, an input of another shape), `leave`
copies the tick state and the kept inputs from graph memory back to the pipeline.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redivider.backward.mailbox import Mailbox
from redivider.pipeline.runners.capturable import Settings, reason_against, signature_of
from redivider.pipeline.runners.control import Control
from redivider.pipeline.runners.cuda_graphs import CudaGraphs, Graphs
from redivider.pipeline.runners.execution import Eager, Execution
from redivider.pipeline.runners.recorded_transport import Part, RecordedTransport
from redivider.pipeline.runners.recording import NONE, Recording
from redivider.pipeline.runners.tick_state import TickState
from redivider.pipeline.schedule import KINDS
from redivider.pipeline.stages.fused_optimizer import fuse, has_hooks
from redivider.pipeline.stages.message import Flow, Message
from redivider.pipeline.stages.ring_buffer import Ring
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.stages.unit import Kept, Unit
from redivider.pipeline.tick import Tick
from redivider.replay.autocast import Autocast
from redivider.replay.seeded import captured_from, replayed_from
from redivider.replay.statistics import counted_later
from redivider.tree import map_tensors

if TYPE_CHECKING:
    from redivider.pipeline.pipeline import Pipeline

logger = logging.getLogger("redivider")

NUM_STEADY = 2  # eager ticks of a steady pipeline before it is recorded: libraries warm up
NUM_UNCHECKED = 16  # ticks between two reads of the flag for a NaN loss
NUM_PHASES = 8  # at least, where memory allows it
PART_FOR_PHASES = 1 / 32  # of a GPU's memory, for the tick states of all phases


@dataclass
class Phase:
    """One recorded tick of the cycle: how to replay it, and where its results lie."""

    parts: list[Part]
    loss: Tensor | None
    aux: Any
    entering: int
    """Micro-batch that entered while the phase was recorded."""
    updates: list[Stage]
    draws_on: torch.device | None
    """Device on which random numbers are drawn, if any are."""
    state: TickState
    """State after the phase, which the next phase reads."""


def num_phases(accumulate: int, nbytes: int, device: torch.device, least: int = 2) -> int:
    """Return the number of ticks to record, where each leaves a state of `nbytes` to the next.

    More phases copy that state less often, and take more memory. There are at least two, because a
    phase reads a flag that the phase before has set; and more than messages may be on their way.
    """
    most = ceil(NUM_PHASES / accumulate)
    if device.type == "cuda" and nbytes:
        memory = PART_FOR_PHASES * torch.cuda.get_device_properties(device).total_memory
        most = min(most, int(memory / (accumulate * nbytes)))
    return accumulate * max(most, ceil(least / accumulate))


class CapturedRunner(Execution):
    """Execution of a pipeline's steady ticks by graphs.

    Args:
        pipe: The pipeline.
        make_graphs: Returns a recorder for a number of lanes.
    """

    def __init__(self, pipe: "Pipeline", make_graphs: Callable[[int], Graphs]) -> None:
        self._pipe = pipe
        self._make_graphs = make_graphs
        self._device = pipe.device
        self._phases: list[Phase] = []
        self._next = 0
        self._signature: Any = None  # of the last inputs and settings
        self._num_alike = 0
        # All micro-batches in flight must be alike, and a few steady ticks must have run.
        self._num_needed = pipe.schedule.num_in_flight + NUM_STEADY
        self._settings = Settings(pipe)
        self._mailbox = Mailbox()
        self._is_refused = False

    def step(self, x: Any, target: Any, side: dict[str, Any]) -> Tick | None:
        inputs = (x, target, side)
        signature = signature_of(inputs, self._device), self._settings.current()
        if signature != self._signature or not self._is_steady():
            self.leave()
            self._signature, self._num_alike = signature, 0
            return None
        self._num_alike += 1
        if not self.is_active:
            if self._num_alike <= self._num_needed:
                return None
            if self._refuses():
                return None
            if not self._phases or self._signature != self._recorded_signature:
                self._phases = []
                if not self._try_to_record(inputs):
                    return None
            elif [stage.num_pending for stage in self._pipe.stages] != self._pending:
                return None  # the cycle begins at another tick between two updates
            self._enter()
        return self._replay(inputs)

    def leave(self) -> None:
        if not self.is_active:
            return
        self.is_active = False
        pipe, before = self._pipe, self._phases[self._next - 1]
        self._messages.end()
        entered = pipe.in_flight.next - 1  # the last one
        before.state.clone(entered - before.entering).restore_to(pipe)
        device = self._control.device
        for stage, unit in self._units():
            like = self._kept_like[unit]
            last = entered - pipe.schedule.lag("F", stage.index)
            first = last - pipe.schedule.num_kept(stage.index) + 1
            ring, unit.ring = unit.ring, None
            unit.kept = {
                n: unit.revive(like, n, device, ring.get(n) if ring else None)
                for n in range(first, last + 1)
                if like is not None
            }
        self._verify_losses(wait=True)

    def withdraw(self) -> None:
        self._signature = None  # it is not among those that must be alike

    def forget(self) -> None:
        if self.is_active:
            self._messages.end()
        self.is_active = False
        self._phases, self._num_alike = [], 0
        for _, unit in self._units():
            unit.ring = None

    def _is_steady(self) -> bool:
        pipe = self._pipe
        is_full = pipe.in_flight.tick >= pipe.schedule.num_in_flight
        # The first step of an optimizer makes its state, and the second one may be compiled.
        has_updated = all(s.num_updates > 1 for s in pipe.stages if s.optimizer is not None)
        return is_full and has_updated and pipe._probe is None and pipe.observer is None

    def _refuses(self) -> bool:
        """Return whether a tick does something that a replay would not do; log it once."""
        reason = None if self._is_refused else self._reason_against()
        if reason is not None:
            self._refuse(reason)
        return self._is_refused

    def _reason_against(self) -> str | None:
        for _, unit in self._units():
            if unit.changes_buffers:
                return f"{unit.name} changes its buffers"
        for stage in self._pipe.stages:
            if has_hooks(stage.optimizer):
                return f"the optimizer of stage {stage.index} has hooks, which would not run"
        return reason_against(self._pipe)  # a caller may have changed options of an optimizer

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        logger.warning("ticks are not captured, and slower for it: %s", reason)

    def _try_to_record(self, inputs: Any) -> bool:
        """Record the phases; if that fails, log why and leave all ticks eager."""
        try:
            self._refresh_casts()
            self._record(inputs)
        except Exception as error:
            self._phases = []
            message = str(error).partition("\n")[0]
            notes = " ".join(getattr(error, "__notes__", []))
            self._refuse(f"recording one failed: {message} {notes}".rstrip())
            return False
        return True

    def _refresh_casts(self) -> None:
        """Cast weights again that a caller has changed since the last update."""
        for _, unit in self._units():
            for casts in unit.weights.casts.values():
                casts.refresh_if_stale()

    def _record(self, inputs: Any) -> None:
        pipe = self._pipe
        entering, device = pipe.in_flight.next, pipe.device
        self._recorded_signature = self._signature
        keeping = [(s, unit) for s, unit in self._units() if unit.keep == "input" and unit.kept]
        self._control = Control(pipe, device, len(keeping))
        least = 1 + pipe.transport.max_leaving
        self._num_phases = num_phases(
            pipe.accumulate, TickState.of(pipe).nbytes, device, max(2, least)
        )
        # A new recorder for every recording: a pool cannot reuse the memory of dropped graphs.
        self._graphs = self._make_graphs(2 * len(pipe.stages))
        self._recording = Recording(
            self._graphs, pipe.schedule, pipe._own, self._num_phases, self._control
        )
        x, target, side = inputs
        target = target if pipe._ends_here else None
        message = Message(entering, Flow(x), Autocast(device), side, target)
        self._messages = pipe.transport.capture(message, self._num_phases, device)
        self._norms = torch.zeros(pipe.schedule.num_stages, dtype=torch.float64, device=device)
        self._pending = [stage.num_pending for stage in pipe.stages]
        self._rings = {
            unit: (stage, Ring([k.value for k in unit.kept.values()], min(unit.kept), slots))
            for (stage, unit), slots in zip(keeping, self._control.slots, strict=True)
        }
        with self._host_unchanged():
            start = TickState.of(pipe).clone()
            start.restore_to(pipe)
            for unit, (_, ring) in self._rings.items():
                unit.ring = ring
            for number in range(self._num_phases):
                self._phases.append(self._record_phase(entering + number, start))
        # The last phase leaves its state in `start`, whose messages still bear the micro-batches
        # that were in flight before the first phase.
        last = self._phases[-1]
        last.state = start
        last.entering = entering - 1

    def _start_counting(self) -> None:
        """Send the numbers of the last tick; graphs count on."""
        schedule, entered = self._pipe.schedule, self._pipe.in_flight.next - 1
        slots, sizes = [], []
        for stage, ring in self._rings.values():
            slots += [ring.slot(entered - schedule.lag(kind, stage.index)) for kind in KINDS]
            sizes += [ring.size] * len(KINDS)
        self._control.start(self._microbatch_of_loss(entered), slots, sizes)

    def _microbatch_of_loss(self, entering: int) -> int:
        """Return the micro-batch whose loss is computed when another one enters."""
        schedule = self._pipe.schedule
        return entering - schedule.lag("F", schedule.num_stages - 1)

    def _record_phase(self, entering: int, start: TickState) -> Phase:
        pipe = self._pipe
        before = [stage.num_updates for stage in pipe.stages]
        updating = [s.index for s in pipe.stages if s.num_pending + 1 == pipe.accumulate]
        self._recording.begin_phase(len(self._phases), updating)
        for stage in pipe.stages:
            stage.forget_prediction()
            if stage.optimizer is not None:
                # Fused kernels skip the step where this flag is set.
                flag = self._recording.fault_seen_by(stage.index)
                stage.optimizer.found_inf = flag  # type: ignore[attr-defined]

        drawn: list[torch.device] = []
        counters_by_times: dict[int, list[Tensor]] = {}

        def run() -> tuple[Tick, list[Part]]:
            pipe.in_flight.entered += 1
            with counted_later() as counters, captured_from(self._oldest(entering)) as draws:
                tick = pipe._run_tick()
            drawn.extend(draws)
            # A counter of a layer that two units share is in the list twice.
            for counter, times in Counter(counters).items():
                counters_by_times.setdefault(times, []).append(counter)
            is_last = len(self._phases) == self._num_phases - 1
            if counters_by_times or is_last:
                self._recording.join()
            for times, alike in counters_by_times.items():
                torch._foreach_add_(alike, times)
            if is_last:
                TickState.of(pipe).copy_to(start)
            return tick, self._recorded_transport.take_parts()

        tick, parts = self._graphs.record(run)
        updates = [
            stage for stage, num in zip(pipe.stages, before, strict=True) if stage.num_updates > num
        ]
        state, draws_on = TickState.of(pipe), drawn[0] if drawn else None
        return Phase(parts, tick.loss, tick.aux, entering, updates, draws_on, state)

    def _enter(self) -> None:
        """Copy everything in flight to where the first phase reads it."""
        pipe = self._pipe
        # Entries differ only in their value and their random numbers: `leave` rebuilds them.
        self._kept_like: dict[Unit, Kept | None] = {
            unit: next((replace(kept, value=None) for kept in unit.kept.values()), None)
            for _, unit in self._units()
        }
        TickState.of(pipe).copy_to(self._phases[-1].state)
        for unit, (_, ring) in self._rings.items():
            ring.fill([kept.value for kept in unit.kept.values()], min(unit.kept))
            unit.ring = ring
        self._start_counting()
        self._messages.begin()
        self._next = 0
        self.is_active = True

    def _replay(self, inputs: Any) -> Tick:
        pipe, phase, flight = self._pipe, self._phases[self._next], self._pipe.in_flight
        transport, t, entering = pipe.transport, flight.tick, flight.next
        self._control.send_rates(phase.updates)
        self._refresh_casts()
        flight.entered += 1
        x, target, side = inputs
        self._messages.enter(entering, x, target if pipe._ends_here else None, side)
        transport.begin_tick()
        if transport.shares_norms:
            self._share_norms()
        for part in phase.parts:
            for direction, j in part.read:
                n = entering - pipe.schedule.lag("F" if direction == "up" else "B", j)
                self._messages.bring((direction, j), n, self._next)
            if part.replay is not None:
                oldest = self._oldest(entering)
                with replayed_from(oldest, pipe.replica_seed, phase.draws_on):
                    part.replay()
            for direction, data in part.sent:
                self._messages.send(direction, data)
            if part.group is not None:
                transport.exchange(t, part.group)
            transport.average_shares(part.averaged)
        # The host counts what the graph has done.
        flight.tick += 1
        for stage in pipe.stages:
            stage.num_pending += 1
        for stage in phase.updates:
            stage.num_pending = 0
            stage.num_updates += 1
        first = pipe.stages[0].index
        transport.forget(first, entering - pipe.schedule.lag("B", first))
        self._next = (self._next + 1) % self._num_phases
        if phase.loss is None:  # it is in another process
            return transport.report(Tick(), t)
        self._verify_losses(wait=False)
        # The next replay of this phase overwrites them.
        loss, aux = map_tensors(Tensor.clone, (phase.loss, phase.aux))
        return transport.report(Tick(self._microbatch_of_loss(entering), loss, aux), t)

    def _share_norms(self) -> None:
        """Bring the gradient norms of all stages to where graphs read them."""
        pipe = self._pipe
        norms = self._phases[self._next - 1].state.norms
        for stage, norm in zip(pipe.stages, norms, strict=True):
            stage.norm = norm
        torch.stack(pipe.transport.norms(pipe.stages), out=self._norms)

    def _verify_losses(self, *, wait: bool) -> None:
        """Raise if a loss was NaN or infinite: at once, or a few ticks later without a wait."""

        def read(microbatch: Tensor) -> None:
            if int(microbatch) < NONE:
                raise FloatingPointError(
                    f"the loss of micro-batch {int(microbatch)} is NaN or infinite; this process "
                    "has done no update with it, and none after it"
                )

        if wait:
            read(self._recording.first_bad)
        elif self._pipe.in_flight.tick % NUM_UNCHECKED == 0:
            self._mailbox.post(self._recording.first_bad, read)
        self._mailbox.poll()

    @contextmanager
    def _host_unchanged(self) -> Iterator[None]:
        """Restore all that the host counts and holds: recording a tick does not run it."""
        pipe = self._pipe
        counters = pipe.in_flight.tick, pipe.in_flight.entered
        state = TickState.of(pipe)
        stages = [(stage, stage.num_pending, stage.num_updates) for stage in pipe.stages]
        kept = [(unit, dict(unit.kept)) for _, unit in self._units()]
        optimizers = [stage.optimizer for stage in pipe.stages if stage.optimizer is not None]
        pipe._tick_context, context = self._recording, pipe._tick_context
        pipe._tick_transport = self._recorded_transport = RecordedTransport(
            pipe.in_flight,
            pipe.packing,
            pipe._own,
            self._recording,
            self._messages,
            self._norms,
            has_replicas=pipe.transport.has_replicas,
        )
        try:
            yield
        finally:
            pipe._tick_context, pipe._stopped = context, None
            pipe._tick_transport = pipe.transport
            for stage in pipe.stages:
                stage.forget_prediction()
            for optimizer in optimizers:
                vars(optimizer).pop("found_inf", None)
            pipe.in_flight.tick, pipe.in_flight.entered = counters
            state.restore_to(pipe)
            for stage, num_pending, num_updates in stages:
                stage.num_pending, stage.num_updates = num_pending, num_updates
            for unit, in_flight in kept:
                unit.kept, unit.ring = in_flight, None
                for casts in unit.weights.casts.values():
                    casts.invalidate()  # the recorded update has noted a cast that did not run

    def _oldest(self, entering: int) -> int:
        """Return the micro-batch whose backward the first stage runs when `entering` enters."""
        return entering - self._pipe.schedule.num_in_flight

    def _units(self) -> list[tuple[Stage, Unit]]:
        return [(stage, unit) for stage in self._pipe.stages for unit in stage.units]


def make_captured(pipe: "Pipeline") -> Execution:
    """Return the execution of a pipeline's ticks by CUDA graphs; log why if that is impossible."""
    for stage in pipe.stages:
        if stage.optimizer is not None:
            fuse(stage.optimizer)
    against = reason_against(pipe)
    if against is None:
        return CapturedRunner(pipe, partial(CudaGraphs, pipe.device))
    logger.info("ticks are not captured: %s", against)
    return Eager()
