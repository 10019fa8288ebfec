"""A pipeline in one process: every stage, tick by tick. The reference for all other runners.

At each tick every stage forwards a new micro-batch and takes an old one back, by the weights it had
when the tick began; then each stage that has done `accumulate` backward passes updates. The order
is schedule.py's.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from redivider.arithmetic import Arithmetic, resolve_arithmetic
from redivider.chain import Chain, takes_of, verify_keywords
from redivider.compiled import CompiledArithmetic, compile_units
from redivider.errors import naming
from redivider.pipeline.arguments import verify_arguments, verify_optimizer
from redivider.pipeline.checkpoint.files import read_state, write_state
from redivider.pipeline.checkpoint.snapshot import restore_snapshot, take_snapshot, verify_snapshot
from redivider.pipeline.diagnostics.probe import Probe
from redivider.pipeline.methods import resolve_method
from redivider.pipeline.partition import balance_of, units_of
from redivider.pipeline.runners.capturable import reason_against
from redivider.pipeline.runners.captured import Concurrent
from redivider.pipeline.runners.cuda_graphs import CudaGraphs
from redivider.pipeline.runners.inputs import Given, verify_given, verify_mode
from redivider.pipeline.runners.prefetch import Feed
from redivider.pipeline.runners.surroundings import Around
from redivider.pipeline.schedule import Action, Way, actions, delay, num_ticks
from redivider.pipeline.stages.compiled_update import CompiledUpdate
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.fused_optimizer import fuse
from redivider.pipeline.stages.loss import Loss
from redivider.pipeline.stages.placement import (
    group_units,
    place_units,
    resolve_cut,
    verify_hooks,
    verify_unshared,
)
from redivider.pipeline.stages.stage import Ahead, Clip, Message, Stage
from redivider.pipeline.stages.unit import Flow
from redivider.replay.autocast import Autocast, without_autocast
from redivider.tree import tensors_of

logger = logging.getLogger("redivider")


@dataclass(frozen=True)
class Tick:
    """The micro-batch that met its loss in a tick; None while the pipeline fills."""

    microbatch: int | None = None
    loss: Tensor | None = None
    aux: Any = None
    reason: str | None = None
    """Why there is no loss here, where that is for another reason: it is in another process."""


class Pipeline:
    """Trains a model by stages that do not wait for each other.

        pipe = rd.Pipeline(model, stages=4, loss=F.cross_entropy, method="petra", accumulate=2,
                           optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.05))
        for images, targets in batches:
            tick = pipe.step(images, targets)     # tick.loss is None while the pipeline fills
        pipe.flush()                              # finish what is in flight
        logits = pipe.evaluate(images)

    It trains the caller's own modules: afterwards the model passed in is trained.

    Args:
        model: A `Chain`, a module with `units()`, or a list of units.
        stages: A number of stages, a list of their sizes, or "auto" for one per unit. A number is
            balanced by the work of each unit on `example`, or by units without one.
        loss: A function or module of (output, target) that returns the loss, or (loss, aux).
        optimizer: Called once for each stage that has parameters to train; makes its optimizer.
        method: What is kept and which weights the backward sees: "petra", "dsp", "delayed",
            "delayed-graph", "exact-inverse" or "approximate-input".
        accumulate: Backward passes per update; their gradients are averaged.
        lr_lambda: Factor of the learning rate by the number of a stage's update. Without it rates
            are as the optimizers have them, for whoever sets them (not with `lookahead`, which must
            know the next ones: then they stay as they were made).
        lr_by_delay: Divide the rate of each stage by 1 + the updates that its gradients are late.
        latency: Ticks that a message travels between neighbouring stages.
        lookahead: "momentum" for forwards by the weights that momentum predicts for the time of
            the backward (SGD with momentum, Adam, AdamW); takes a copy of the weights of every
            stage but the last.
        arithmetic: "float" or "fixed", as for a chain.
        message_dtype: What numbers become between stages: None for what they are, torch.bfloat16,
            or torch.int8 with a scale for every sample.
        clip_norm: Largest norm of a stage's gradient; None for no clipping.
        clip_over: "stage", or "all": with the other stages' norms at their last updates.
        seed: Of the random numbers, a function of seed, micro-batch and unit; torch's own seed
            unless given.
        capture: Whether to capture steady ticks on a GPU as CUDA graphs with a branch for each
            stage. Where they cannot be, the log says why.
        example: An input by which the work of the units is counted for the cut.
    """

    num_replicas = 1
    """Pipelines that average their gradients."""
    is_spread = False
    """Whether it is over several processes."""

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
        latency: int = 1,
        lookahead: Literal["momentum"] | None = None,
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
        self.latency = int(latency)
        self.seed = torch.initial_seed() if seed is None else index(seed)
        self.arithmetic = resolve_arithmetic(arithmetic)
        self.packing = Packing(message_dtype)
        self.cut, self._loads = resolve_cut(units, stages, example)
        self.balance = balance_of(self._loads)
        self.lookahead = lookahead
        self._factor, self._lr_by_delay = lr_lambda, lr_by_delay
        if lookahead and lr_lambda is None:
            self._factor = lambda update: 1.0  # the next rates must be known
        self._clip = None if clip_norm is None else Clip(clip_norm, clip_over)
        verify_unshared(units, self.cut, loss)
        self._unit_names, self._takes = list(units), takes_of(units.values())
        self._own, draws = self._take_part(units, loss)
        placed = place_units(units, self.cut, self.method, self.arithmetic, draws, self._own)
        self.stages = group_units(placed, self.cut, self._own)
        self._units = {name: each for stage in self.stages for name, each in stage.by_name.items()}
        modules = {name: each.module for name, each in self._units.items()}
        self._chain = Chain(modules.values(), backward="store", arithmetic=self.arithmetic)
        self._loss = Loss(loss, len(units), draws)
        self._ends_here = self._own[-1] == len(self.cut) - 1
        if self._ends_here:
            verify_hooks("the loss", self._loss.module)
            self._loss.hang_in(self.stages[-1])
        for stage in self.stages:
            stage.module.zero_grad()  # what was left would count as a first backward pass
            if any(each.requires_grad for each in stage.module.parameters()):
                stage.optimizer = optimizer(stage.module)
                verify_optimizer(stage.optimizer, stage, lookahead=lookahead is not None)
                if lr_by_delay:
                    late = delay(stage.index, len(self.cut), self.latency) / self.accumulate
                    stage.divide_rates(1 + late)
                if lookahead:
                    assert self._factor is not None
                    stage.ahead = Ahead(accumulate, self._factor)
        self._tick = 0  # since the pipeline was last empty
        self._first = 0  # the micro-batch that entered at tick 0
        self._entered = 0  # micro-batches since then
        # On their way: by stage, then by micro-batch.
        self._up: list[dict[int, Message]] = [{} for _ in self.cut]
        self._down: list[dict[int, Message]] = [{} for _ in self.cut]
        self._given = Given()
        self._stopped: str | None = None
        self._probe: Probe | None = None
        self._around = Around()
        self._concurrent: Concurrent | None = None
        self.observer: Callable[[Action, float], None] | None = None
        """Told of every action when it is done, with the time at which it began."""
        logger.info("%s", self)
        device = self.device
        self._feed = Feed(device) if device.type == "cuda" else None
        if capture and device.type == "cuda":
            for stage in self.stages:
                if stage.optimizer is not None:
                    fuse(stage.optimizer)
            against = reason_against(self)
            if against is None:
                self._concurrent = Concurrent(self, partial(CudaGraphs, device))
            else:
                logger.info("ticks are not captured: %s", against)

    def step(self, x: Any, target: Any = None, /, **side: Any) -> Tick:
        """Feed a micro-batch and run one tick; return the loss of the one that met it.

        An input and a target on the host go to the model's GPU while the last tick runs there.
        """
        verify_keywords(side, self._takes)
        verify_mode()
        verify_given(x, target, side)
        self._verify_running()
        if self._feed is not None:
            x, target = self._feed.bring((x, target))
        if self._concurrent is not None:
            with self._stopping():
                found = self._concurrent.step(x, target, side)
            if found is not None:
                self._given.forget()  # graphs have copies
                return Tick(*found)
        self._enter(self._first + self._entered, x, target, side)
        self._entered += 1
        return self._run_tick()

    def compile(self, **options: Any) -> None:
        """Compile what units compute, forward and recovery; units of one kind share their graphs.

        `options` are those of `torch.compile`.
        """
        self._leave_graphs()
        if self._concurrent is not None:
            self._concurrent.forget()
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

        A last group of fewer than `accumulate` backward passes stays summed and joins the next one,
        or is applied, averaged over its own count, with `update=True`.
        """
        verify_mode()
        self._verify_running()
        self._leave_graphs()
        ticks = []
        while self._tick < num_ticks(self._entered, len(self.cut), self.latency):
            ticks.append(self._run_tick())
        self._first += self._entered
        self._tick = self._entered = 0
        if update:
            with self._stopping(), without_autocast(self.device):
                self._update([stage for stage in self.stages if stage.num_pending])
        return [tick for tick in ticks if tick.microbatch is not None]

    @torch.no_grad()
    def evaluate(self, x: Any, /, **side: Any) -> Any:
        """Run the model in evaluation mode by the weights of now; at any time."""
        with self._evaluating():
            return self._chain(x, **side)

    def probe(self, every: int = 100) -> Probe:
        """From now on, measure the gradients of every so many micro-batches, stage by stage.

        probe = pipe.probe(every=200)
        ...  # train
        print(probe)
        probe.plot("quality.png")
        """
        self._probe = Probe(self.stages, self._loss, self.arithmetic, every)
        return self._probe

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next ticks depend on, copied: all that is in flight, too."""
        self._verify_running()
        self._leave_graphs()
        return take_snapshot(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, bit for bit; one that does not fit changes nothing."""
        verify_snapshot(self, state)
        if self._concurrent is not None:
            self._concurrent.forget()
        self._given.forget()
        with self._stopping():
            restore_snapshot(self, state)
        self._stopped = None
        if self._probe is not None:
            self._probe.forget()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers of the uncut model, under its names."""
        return {
            f"{name}.{key}": value
            for name, unit in self._units.items()
            for key, value in unit.module.state_dict().items()
        }

    def save(self, folder: str | Path) -> None:
        """Write the state to a folder: safetensors (a package to install) and a manifest."""
        write_state(folder, self.state_dict())

    def load(self, folder: str | Path) -> None:
        """Continue from a folder that `save` wrote."""
        self.load_state_dict(read_state(folder))

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        return next(self._chain.parameters(), torch.empty(0)).device

    @property
    def num_in_flight(self) -> int:
        """Micro-batches that have entered and not yet left."""
        left = self._tick - delay(0, len(self.cut), self.latency)
        return self._entered - max(0, left)

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.method.name}: {sum(self.cut)} units in {len(self.cut)} stages, "
            f"stages={self.cut}, balance {self.balance:.2f} of {len(self.cut)}, "
            f"accumulate={self.accumulate}, latency={self.latency}"
            + (f", lookahead={self.lookahead!r})" if self.lookahead else ")")
        )

    def _take_part(self, units: dict[str, nn.Module], loss: Any) -> tuple[range, int]:
        """Which stages are here: all of them; and the seed of what is drawn in them."""
        return range(len(self.cut)), self.seed

    def _enter(self, n: int, x: Any, target: Any, side: dict[str, Any]) -> None:
        """Let a micro-batch in."""
        found = tensors_of(x)
        if not found:
            raise TypeError(f"a step needs a tensor, or a structure of some, got {x!r}")
        self._given.note(n, (x, side), target)
        autocast = Autocast(found[0].device)
        message = self._up[0][n] = Message(n, Flow(x), autocast, side, target)
        if self._probe is not None:
            self._probe.enter(message)

    def _deliver(self, way: Way, j: int, message: Message) -> None:
        """Bring a message to a stage."""
        self._inbox(way, j)[message.microbatch] = message.rounded(self.packing)

    def _fetch(self, way: Way, j: int, n: int) -> Message:
        """Take a message that has come to a stage."""
        return self._inbox(way, j).pop(n)

    def _inbox(self, way: Way, j: int) -> dict[int, Message]:
        """The messages that have come to a stage, by micro-batch."""
        return (self._up if way == "up" else self._down)[j]

    def _in_flight(self) -> dict[int, tuple[dict[str, Any], Autocast]]:
        """The side inputs and the autocast settings of every micro-batch in flight."""
        inboxes = (*self._up, *self._down)
        return {n: (m.side, m.autocast) for inbox in inboxes for n, m in inbox.items()}

    def _targets(self) -> dict[int, Any]:
        """The targets of those that have not met their loss."""
        return {n: each.target for inbox in self._up for n, each in inbox.items()}

    def _end_tick(self) -> None:
        """All actions of a tick are done, and no update yet."""

    def _norms(self) -> list[Tensor]:
        """Of the gradients of all stages, at their last updates."""
        return [stage.norm for stage in self.stages]

    def _stage(self, j: int) -> Stage:
        return self.stages[j - self._own.start]

    def _run_tick(self) -> Tick:
        result = Tick()
        # Units enter the autocast of their micro-batch. Pull-backs and updates come behind it, as
        # in plain training, be the caller in a step under autocast or in a flush.
        with self._stopping(), without_autocast(self.device):
            due = actions(self._tick, len(self.cut), self.latency, self._entered)
            for kind, j, local in due:
                if j not in self._own:
                    continue
                n = self._first + local
                start = time.perf_counter()
                with self._around.lane(kind, j):
                    if kind == "F":
                        result = self._forward(j, n) or result
                    else:
                        self._backward(j, n)
                if self.observer is not None:
                    self.observer(Action(kind, j, n), start)
            self._tick += 1
            self._end_tick()
            self._update([s for s in self.stages if s.num_pending >= self.accumulate])
        return result

    def _forward(self, j: int, n: int) -> Tick | None:
        stage, message = self._stage(j), self._fetch("up", j, n)
        if self._probe is None:
            message = stage.run_forward(message)
        else:
            with self._probe.watching_forward(stage, n) as seen:
                message = seen["sent"] = stage.run_forward(message)
        if j + 1 < len(self.cut):
            self._deliver("up", j + 1, message)
            return None
        with naming(f"stage {j}, loss, micro-batch {n}"), message.autocast.again():
            down, loss, aux = self._loss.run(message, self.arithmetic, self._around.guard)
            self._down[j][n] = down
        return Tick(n, loss, aux)

    def _backward(self, j: int, n: int) -> None:
        stage, message = self._stage(j), self._fetch("down", j, n)
        watching = (
            nullcontext() if self._probe is None else self._probe.watching_backward(stage, message)
        )
        with watching:
            message = stage.run_backward(message)
        if j > 0:
            self._deliver("down", j - 1, message)

    def _update(self, stages: Sequence[Stage]) -> None:
        norms = self._norms()  # as known when the tick began
        for stage in stages:
            others = [norm for j, norm in enumerate(norms) if j != stage.index]
            with self._around.lane("U", stage.index):
                if self._factor is not None:
                    self._around.set_rate(stage, self._factor(stage.num_updates))
                stage.update(self._clip, others)

    def _leave_graphs(self) -> None:
        if self._concurrent is not None:
            with self._stopping():
                self._concurrent.leave()

    def _verify_running(self) -> None:
        if self._stopped is not None:
            raise RuntimeError(
                f"the pipeline was stopped in the middle of a tick by: {self._stopped}; load a "
                "state from before, or build it anew"
            )
        done = self._tick - self.latency * (len(self.cut) - 1)  # that have met their loss
        with self._stopping():
            self._given.verify(
                self._first + self._entered - self.num_in_flight, self._first + max(0, done)
            )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Be in evaluation mode for a while."""
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
