"""A pipeline in one process: every stage, tick by tick. The reference for all other runners.

In every tick a stage runs the forward of a new micro-batch and the backward of an old one. A stage
that has run `accumulate` backward passes updates. The order is schedule.py's.

    caller --step--> inbox 0 --F0--> inbox 1 --F1--> ... inbox J-1 --F, loss--+
                     inbox 0 <--B1-- inbox 1 <--B2-- ... inbox J-1 <----------+
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from redivider.arithmetic import Arithmetic, resolve_arithmetic
from redivider.chain import Chain, takes_of, verify_keywords
from redivider.errors import naming
from redivider.pipeline.arguments import verify_arguments, verify_optimizer
from redivider.pipeline.checkpoint.snapshot import restore_snapshot, take_snapshot, verify_snapshot
from redivider.pipeline.methods import resolve_method
from redivider.pipeline.partition import balance_of, units_of
from redivider.pipeline.runners.execution import Eager, Execution
from redivider.pipeline.runners.in_flight import InFlight
from redivider.pipeline.runners.inputs import CallerTensors, verify_inputs, verify_mode
from redivider.pipeline.runners.prefetch import Prefetch
from redivider.pipeline.runners.tick_context import EagerTick, TickContext
from redivider.pipeline.runners.transport import InProcess, TickTransport, Transport
from redivider.pipeline.schedule import Action, Schedule, resolve_latency
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.lookahead import LOOKAHEADS, Ahead, ByDisplacement, Lead
from redivider.pipeline.stages.loss import Loss
from redivider.pipeline.stages.placement import (
    group_units,
    place_units,
    resolve_cut,
    verify_hooks,
    verify_unshared,
)
from redivider.pipeline.stages.stage import Clip, Stage
from redivider.pipeline.tick import Tick
from redivider.replay.autocast import without_autocast

if TYPE_CHECKING:
    from redivider.pipeline.diagnostics.memory import StagesMemory
    from redivider.pipeline.diagnostics.probe import Probe
    from redivider.pipeline.diagnostics.timeline import Timeline

logger = logging.getLogger("redivider")


class Pipeline:
    """Pipeline of stages that do not wait for each other, in one process.

        pipe = rd.Pipeline(model, stages=4, loss=F.cross_entropy, method="petra", accumulate=2,
                           optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.05))
        for images, targets in batches:
            tick = pipe.step(images, targets)     # tick.loss is None while the pipeline fills
        pipe.flush()                              # finish what is in flight
        logits = pipe.evaluate(images)

    It trains the caller's own modules: afterwards the model passed in is trained.

    Args:
        model: A `Chain`, an `nn.Sequential`, a module with `units()`, or a list of units.
        stages: A number of stages, a list of their sizes, or "auto" for one per unit. A number is
            balanced by the work of each unit on `example`, or by units without one.
        loss: A function or module of (output, target) that returns the loss, or (loss, aux).
        optimizer: Function from a stage's module to its optimizer; called once for every stage that
            has parameters to train.
        method: What is kept and which weights the backward uses: "petra", "dsp", "delayed",
            "delayed-graph", "exact-inverse" or "approximate-input".
        accumulate: Backward passes per update; their gradients are averaged.
        lr_lambda: Factor of the learning rate, as a function of the number of a stage's updates.
            Without it the optimizers' own rates count, and the caller may set them at any time.
        lr_by_delay: Divide a stage's learning rate by 1 + the updates that its gradients are late.
        latency: Ticks that a message travels between neighbouring stages: a multiple of 0.5, or a
            list with one for every pair of neighbours. At 0.5 gradients are half as late as at 1,
            and a slow transfer or stage is not hidden.
        lookahead: True to run the forward by the weights that the last update predicts for the time
            of the backward, which helps SGD and Muon more than one update late. "lead" to let
            updates go further where they grow, which helps AdamW less than one update late. Needs
            two copies of the weights, or one, of every stage but the last.
        arithmetic: "float" or "fixed", as for a chain.
        message_dtype: Dtype of messages between stages: None to leave it, torch.bfloat16, or
            torch.int8 with a scale for every sample.
        clip_norm: Largest norm of a stage's gradient; None for no clipping.
        clip_over: "stage", or "all": with the other stages' norms at their last updates.
        seed: Seed of the random numbers, which depend on seed, micro-batch and unit; torch's own
            seed by default.
        capture: Whether to capture steady ticks on a GPU as CUDA graphs with a branch for every
            stage. If that is impossible, the log says why.
        example: Input on which the work of the units is counted, to balance the stages.
    """

    num_replicas = 1
    """Number of pipelines that average their gradients."""
    is_spread = False
    """Whether the stages are in several processes."""

    def __init__(
        self,
        model: Any,
        *,
        stages: int | Sequence[int] | Literal["auto"],
        loss: Callable[..., Any],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        method: str = "petra",
        accumulate: int = 1,
        lr_lambda: Callable[[int], float] | None = None,
        lr_by_delay: bool = False,
        latency: float | Sequence[float] = 1,
        lookahead: Literal["displacement", "lead", "momentum"] | bool | None = None,
        arithmetic: str | Arithmetic = "float",
        message_dtype: torch.dtype | None = None,
        clip_norm: float | None = None,
        clip_over: Literal["stage", "all"] = "stage",
        seed: int | None = None,
        capture: bool = True,
        example: Any = None,
    ) -> None:
        verify_arguments(
            loss=loss,
            optimizer=optimizer,
            accumulate=accumulate,
            lr_lambda=lr_lambda,
            lr_by_delay=lr_by_delay,
            latency=latency,
            lookahead=lookahead,
            clip_norm=clip_norm,
            clip_over=clip_over,
        )
        units = units_of(model)
        self.method = resolve_method(method)
        self.accumulate = int(accumulate)
        self.seed = torch.initial_seed() if seed is None else index(seed)
        self.arithmetic = resolve_arithmetic(arithmetic)
        self.packing = Packing(message_dtype)
        self.cut, self._loads = resolve_cut(units, stages, example)
        self.balance = balance_of(self._loads)
        self.latency = resolve_latency(latency, len(self.cut))
        self.schedule = Schedule(len(self.cut), self.latency)
        self.lookahead = LOOKAHEADS[lookahead]
        self._factor, self._lr_by_delay = lr_lambda, lr_by_delay
        self._clip = None if clip_norm is None else Clip(clip_norm, clip_over)
        verify_unshared(units, self.cut, loss)
        self._unit_names, self._takes = list(units), takes_of(units.values())
        self._own, self.replica_seed = self._take_part(units, loss)
        placed = place_units(
            units, self.cut, self.method, self.arithmetic, self.replica_seed, self._own
        )
        self.stages = group_units(placed, self.cut, self._own)
        self._units = {name: unit for stage in self.stages for name, unit in stage.by_name.items()}
        modules = [unit.module for unit in self._units.values()]
        self._chain = Chain(modules, backward="store", arithmetic=self.arithmetic)
        self._loss = Loss(loss, len(units), self.replica_seed)
        self._ends_here = self._own[-1] == len(self.cut) - 1
        if self._ends_here:
            verify_hooks("the loss", self._loss.module)
            self._loss.attach_to(self.stages[-1])
        for stage in self.stages:
            stage.module.zero_grad()  # gradients of the caller would count as a backward pass
            if any(param.requires_grad for param in stage.module.parameters()):
                stage.optimizer = optimizer(stage.module)
                verify_optimizer(stage.optimizer, stage)
                if lr_by_delay:
                    late = self.schedule.delay(stage.index) / self.accumulate
                    stage.divide_rates(1 + late)
                if self.lookahead and self.schedule.delay(stage.index):
                    stage.ahead = self._make_ahead(stage.index)
            stage.accumulate = self.accumulate
        self.in_flight = InFlight(self.schedule)
        self._caller_tensors = CallerTensors()
        self.transport = self._make_transport()
        """Transport of the messages: within the process, or between processes."""
        self._tick_transport: TickTransport = self.transport
        self._stopped: str | None = None
        self._can_withdraw = False  # until stage 0, the first in a tick, has run its forward
        self._probe: Probe | None = None
        self._tick_context: TickContext = EagerTick()
        self.execution: Execution = Eager()
        """Execution of the ticks: eager, or by graphs."""
        self.observer: Callable[[Action, float], None] | None = None
        """Called after every action, with the time at which it began."""
        logger.info("%s", self)
        device = self.device
        self._prefetch = Prefetch(device) if device.type == "cuda" else None
        if capture and device.type == "cuda":
            from redivider.pipeline.runners.captured import make_captured

            self.execution = make_captured(self)

    def step(self, x: Any, target: Any = None, /, **side: Any) -> Tick:
        """Feed a micro-batch and run one tick; return the loss that was computed in it.

        An input and a target on the host are copied to the model's GPU while the last tick runs.
        If the first stage raises for an input, the step has no effect, and the next one may follow.
        """
        verify_keywords(side, self._takes)
        verify_mode()
        verify_inputs(x, target, side)
        self._verify_running()
        if self._prefetch is not None:
            x, target = self._prefetch.bring((x, target))
        with self._stopping():
            tick = self.execution.step(x, target, side)
        if tick is not None:
            self._caller_tensors.forget()  # graphs have copies
            return tick
        n = self.in_flight.next
        message = self.transport.enter(n, x, target, side)
        needed = () if message is None else (x, side)
        self._caller_tensors.note(n, needed, target if self._ends_here else None)
        if self._probe is not None and message is not None:
            self._probe.enter(message)
        self.in_flight.entered += 1
        self._can_withdraw = True
        try:
            return self._run_tick()
        except Exception as error:
            if self._can_withdraw and self.transport.withdraw():
                self._caller_tensors.drop(n)
                self.execution.withdraw()
                self._stopped = None
                error.add_note("this step had no effect, and the pipeline takes another one")
            raise

    def compile(self, **options: Any) -> None:
        """Compile the forward and the recovery of the units; units of one kind share graphs.

        `options` are those of `torch.compile`.
        """
        from redivider.compile import CompiledArithmetic, compile_units
        from redivider.pipeline.stages.compiled_update import CompiledUpdate

        self._leave_graphs()
        self.execution.forget()
        compile_units((unit.module for unit in self._units.values()), **options)
        if self._ends_here:
            self._loss.module.compile(**options)
        self.arithmetic = CompiledArithmetic(self.arithmetic, **options)
        update = CompiledUpdate(**options)
        for unit in self._units.values():
            unit.arithmetic, unit.widen = self.arithmetic, update.widen
        for stage in self.stages:
            stage.compiled_update = update

    def flush(self, *, update: bool = False) -> list[Tick]:
        """Run ticks without new inputs until nothing is in flight; return those with a loss.

        With `update=True`, a last group of fewer than `accumulate` backward passes is averaged over
        its own count and applied. Otherwise it stays summed, and joins the next group.
        """
        verify_mode()
        self._verify_running()
        self._leave_graphs()
        ticks = [self._run_tick() for _ in range(self.in_flight.num_ticks_left)]
        self.in_flight.restart()
        if update:
            with self._stopping(), without_autocast(self.device):
                norms = self.transport.norms(self.stages)
                self._update([stage for stage in self.stages if stage.num_pending], norms)
        return [tick for tick in ticks if tick.microbatch is not None]

    @torch.no_grad()
    def evaluate(self, x: Any, /, **side: Any) -> Any:
        """Run the model in evaluation mode by the current weights; at any time."""
        with self._evaluating():
            return self._chain(x, **side)

    def probe(self, every: int = 100) -> "Probe":
        """Measure the gradients of every `every`-th micro-batch from now on, stage by stage.

        probe = pipe.probe(every=200)
        ...  # train
        print(probe)
        probe.plot("quality.png")
        """
        from redivider.pipeline.diagnostics.probe import Probe

        self._probe = Probe(self.stages, self._loss, self.arithmetic, every)
        return self._probe

    def timeline(self, num_microbatches: int | None = None) -> "Timeline":
        """Return the plan of the first micro-batches, until they have left again.

        print(pipe.timeline())
        pipe.timeline(10).plot("timeline.png")
        """
        from redivider.pipeline.diagnostics.timeline import Timeline

        if num_microbatches is None:
            num_microbatches = self.schedule.num_in_flight + 1  # so that the pipeline is full once
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
        return Timeline.plan(self.schedule, num_microbatches)

    def measure_memory(self, x: Any, /, **side: Any) -> "StagesMemory":
        """Count the bytes that every stage holds for inputs like x, on a copy of the model."""
        from redivider.pipeline.diagnostics.memory import measure_holdings

        verify_keywords(side, self._takes)
        return measure_holdings(self, x, side)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that the next ticks depend on, with all that is in flight."""
        self._verify_running()
        self._leave_graphs()
        return take_snapshot(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, bit for bit; a state that does not fit changes nothing."""
        verify_snapshot(self, state)
        self.execution.forget()
        self._caller_tensors.forget()
        with self._stopping():
            restore_snapshot(self, state)
        self._stopped = None
        if self._probe is not None:
            self._probe.forget()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the weights and buffers of the uncut model, under its names."""
        return {
            f"{name}.{key}": value
            for name, unit in self._units.items()
            for key, value in unit.module.state_dict().items()
        }

    def save(self, folder: str | Path) -> None:
        """Write the state to a folder: safetensors (a package to install) and a manifest."""
        from redivider.pipeline.checkpoint.files import write_state

        write_state(folder, self.state_dict())

    def load(self, folder: str | Path) -> None:
        """Resume from a folder that `save` wrote."""
        from redivider.pipeline.checkpoint.files import read_state

        self.load_state_dict(read_state(folder))

    @property
    def device(self) -> torch.device:
        """Device of the stages."""
        return next(self._chain.parameters(), torch.empty(0)).device

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches that have entered and not left."""
        return self.in_flight.num

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.method.name}: {sum(self.cut)} units in {len(self.cut)} stages, "
            f"stages={self.cut}, balance {self.balance:.2f} of {len(self.cut)}, "
            f"accumulate={self.accumulate}, latency={self.latency}"
            + (f", lookahead={self.lookahead!r})" if self.lookahead else ")")
        )

    def _take_part(self, units: dict[str, nn.Module], loss: Any) -> tuple[range, int]:
        """Return the stages of this process, which are all, and the seed of its replica."""
        return range(len(self.cut)), self.seed

    def _make_ahead(self, j: int) -> Ahead:
        if self.lookahead == "lead":
            return Lead(self.schedule.delay(j) / self.accumulate)
        return ByDisplacement()

    def _stage(self, j: int) -> Stage:
        return self.stages[j - self._own.start]

    def _make_transport(self) -> Transport:
        return InProcess(self.in_flight, self.packing)

    def _run_tick(self) -> Tick:
        result, flight = Tick(), self.in_flight
        t, entered = flight.tick, flight.entered
        self._tick_transport.begin_tick()
        # Units enter the autocast of their own micro-batch. Backward passes and updates run without
        # it, as in plain training, whether the caller is under autocast or not.
        with self._stopping(), without_autocast(self.device):
            norms = self._tick_transport.norms(self.stages)  # of before the tick, for clipping
            for group, actions in enumerate(self.schedule.groups(t, entered)):
                for action in actions:
                    if action.stage in self._own:
                        result = self._run_action(action) or result
                self._tick_transport.exchange(t, group)
                for stage in self.stages:
                    if stage.is_unfinished:
                        with self._tick_context.lane("B", stage.index):
                            stage.finish_backward()
                self._update([s for s in self.stages if s.num_pending >= self.accumulate], norms)
            flight.tick += 1
        return self._tick_transport.report(result, t)

    def _run_action(self, action: Action) -> Tick | None:
        """Run a forward or a backward; return the loss, if it was computed."""
        kind, j, n = action.kind, action.stage, self.in_flight.first + action.microbatch
        start = time.perf_counter()
        result = None
        with self._tick_context.lane(kind, j):
            if kind == "F":
                result = self._forward(j, n)
            else:
                self._backward(j, n)
        if self.observer is not None:
            self.observer(Action(kind, j, n), start)
        return result

    def _forward(self, j: int, n: int) -> Tick | None:
        stage, message = self._stage(j), self._tick_transport.fetch("up", j, n)
        self._tick_context.hold(message)
        if self._probe is None:
            message = stage.run_forward(message)
        else:
            with self._probe.watching_forward(stage, n) as seen:
                message = seen["sent"] = stage.run_forward(message)
        self._can_withdraw = False
        if j + 1 < len(self.cut):
            self._tick_transport.deliver("up", j + 1, message)
            return None
        with naming(f"stage {j}, loss, micro-batch {n}"), message.autocast.again():
            down, loss, aux = self._loss.run(message, self.arithmetic, self._tick_context.guard)
            self.in_flight.down[j][n] = down
        return Tick(n, loss, aux)

    def _backward(self, j: int, n: int) -> None:
        stage, message = self._stage(j), self._tick_transport.fetch("down", j, n)
        self._tick_context.hold(message)
        watching = (
            nullcontext() if self._probe is None else self._probe.watching_backward(stage, message)
        )
        with watching:
            message = stage.run_backward(message, is_urgent=self._tick_transport.is_urgent(j))
        if j > 0:
            self._tick_transport.deliver("down", j - 1, message)
        self._tick_transport.forget(j, n)

    def _update(self, stages: Sequence[Stage], norms: Sequence[Tensor]) -> None:
        """Update stages; `norms` are those of the gradients of all stages."""
        self._tick_transport.average(stages)
        for stage in stages:
            others = [norm for j, norm in enumerate(norms) if j != stage.index]
            with self._tick_context.lane("U", stage.index):
                if self._factor is not None:
                    self._tick_context.set_rate(stage, self._factor(stage.num_updates))
                stage.update(self._clip, others)

    def _leave_graphs(self) -> None:
        with self._stopping():
            self.execution.leave()

    def _verify_running(self) -> None:
        if self._stopped is not None:
            raise RuntimeError(
                f"the pipeline was stopped in the middle of a tick by: {self._stopped}; load a "
                "state from before, or build a new one around the model, which keeps its weights"
            )
        with self._stopping():
            self._caller_tensors.verify(self.in_flight.oldest, self.in_flight.oldest_without_loss)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode inside the context."""
        flags = [(module, module.training) for module in self._chain.modules()]
        self._chain.eval()
        try:
            yield
        finally:
            for module, flag in flags:
                module.training = flag

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._stopped = f"{type(error).__name__}: {error}"
            raise
