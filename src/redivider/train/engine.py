"""Engines: train a model one micro-batch at a time, by backprop or by a pipeline."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from redivider.budget.plan import Plan
from redivider.budget.planner import plan
from redivider.checks.memory import measure_memory
from redivider.errors import CaptureError
from redivider.gpu.capture import capture
from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.diagnostics.memory import Holding, holdings
from redivider.pipeline.diagnostics.timeline import Spans, measured_spans
from redivider.pipeline.pipeline import Pipeline
from redivider.train.errors import TrainError, first_mismatch
from redivider.train.optim import make_optimizer
from redivider.train.processes import Processes
from redivider.train.recipe import Recipe
from redivider.train.schedule import Schedule
from redivider.train.task import Score, Task

logger = logging.getLogger("redivider")

MESSAGES = {None: None, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Metrics:
    """Loss and number of correct predictions of a micro-batch, as tensors on the device."""

    loss: Tensor
    correct: Tensor | None


class Engine(ABC):
    """Base of the engines, which train the model of a task one micro-batch at a time."""

    processes = Processes()
    """Processes of the run."""
    plan: Plan | None = None
    """Plan that was made for the memory of the recipe."""

    def __init__(self, recipe: Recipe, task: Task, schedule: Schedule) -> None:
        self.recipe, self.task, self.schedule = recipe, task, schedule
        self.device = task.train.device

    def batches(self, start: int) -> Iterator[tuple[Any, Any]]:
        """Return the inputs of `step`, from micro-batch `start` on."""
        return self.task.train.since(start)

    def prepare(self) -> None:  # noqa: B027, optional
        """Do what may refuse the recipe, before a new run has a folder."""

    @abstractmethod
    def step(self, x: Tensor, y: Tensor) -> list[Metrics]:
        """Train on a micro-batch; return the metrics that are ready, of this or earlier ones."""

    @abstractmethod
    def finish(self) -> list[Metrics]:
        """Run the backward of all micro-batches in flight, at the end of training."""

    @abstractmethod
    def evaluate(self) -> Score:
        """Score the test data with the current weights."""

    @abstractmethod
    def holdings(self) -> list[Holding] | None:
        """Return the memory held for the backward, by stage; None while a pipeline fills."""

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Number of updates so far; for a pipeline, those of its last stage."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`, to resume bit for bit."""

    def wants(self, path: tuple[Any, ...]) -> bool:
        """Return whether this process needs the part of a state under these keys."""
        return True

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights, under the names of the model."""
        return self.task.model.state_dict()

    def _autocast(self, *, enabled: bool = True) -> AbstractContextManager[Any]:
        if self.recipe.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
        return nullcontext()


class _Targeted(nn.Module):
    """A loss with its targets."""

    def __init__(self, loss: nn.Module, y: Tensor) -> None:
        super().__init__()
        self.loss, self._y = loss, y

    def forward(self, output: Any) -> Any:
        return self.loss(output, self._y)


class BackpropEngine(Engine):
    """Plain, checkpointed or reversible backprop, in steps of `accumulate` micro-batches.

    On a GPU the whole step is captured as a CUDA graph where possible.
    """

    def __init__(self, recipe: Recipe, task: Task, schedule: Schedule) -> None:
        super().__init__(recipe, task, schedule)
        module = nn.ModuleList([task.body, task.loss])
        self._parameters = list(module.parameters())
        fused = self.device.type == "cuda" or None
        self._optimizer = make_optimizer(recipe, module, fused=fused)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._pending: list[Tensor] = []
        self._num_updates = 0
        self._is_planned = False
        self._run: Any = None
        if recipe.compile:
            task.body.compile(dynamic=False)

    def prepare(self) -> None:
        if self.recipe.memory is not None and not self._is_planned:
            self._plan(*self.task.train[0])

    def step(self, x: Tensor, y: Tensor) -> list[Metrics]:
        self._pending += [x, y]
        if len(self._pending) < 2 * self.recipe.accumulate:
            return []
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.schedule(self._num_updates)
        inputs, self._pending = tuple(self._pending), []
        if self._run is None:
            self._run = self._capture(inputs)
        losses, corrects = self._run(*inputs)
        self._num_updates += 1
        counts = [None] * len(losses) if corrects is None else corrects
        return [Metrics(loss, correct) for loss, correct in zip(losses, counts, strict=True)]

    def finish(self) -> list[Metrics]:
        return []

    def evaluate(self) -> Score:
        body = self.task.body.eval()
        try:
            with self._autocast():
                return self.task.evaluate(body)
        finally:
            body.train()

    def holdings(self) -> list[Holding] | None:
        x, _ = self.task.train[0]
        with self._autocast():
            return [Holding(0, measure_memory(self.task.body, x).held, 0, 0)]

    @property
    def num_updates(self) -> int:
        return self._num_updates

    def state_dict(self) -> dict[str, Any]:
        assert not self._pending, "a state is taken between updates"
        state: dict[str, Any] = {
            "num_updates": self._num_updates,
            "model": dict(self.task.model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        if self._is_planned:
            state["plan"] = list(self.task.body.backward)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.task.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise StateError(first_mismatch(error)) from error
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_updates = state["num_updates"]
        torch.set_rng_state(state["random"].cpu())
        if "random_cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self.device)
        if "plan" in state:  # one that is timed again may differ
            self.task.body.backward = state["plan"]
            self._is_planned = True
        self._run = None  # a captured step holds the old state

    def _plan(self, x: Tensor, y: Tensor) -> None:
        """Choose what every unit keeps, within the memory of the recipe."""
        loss = _Targeted(self.task.loss, y)
        try:
            with self._autocast():
                chosen = plan(
                    self.task.body,
                    x,
                    memory=self.recipe.memory,
                    loss=loss,
                    capture=self.recipe.capture,
                )
        except ValueError as error:  # too little; its message says how much is needed
            raise TrainError(f"{error}, or allow more: --microbatch, --memory") from error
        chosen.apply()
        self.plan, self._is_planned = chosen, True

    def _capture(self, inputs: tuple[Tensor, ...]) -> Any:
        """Return the update as a CUDA graph where possible, else the eager function."""
        if self.recipe.capture and self.device.type == "cuda":
            try:
                return capture(self._update, inputs)
            except CaptureError as error:
                logger.warning("steps are not captured, and slower for it: %s", error)
        return self._update

    def _update(self, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor] | None]:
        losses, corrects = [], []
        self._optimizer.zero_grad()
        # Autocast caches its casts of weights until the outermost autocast context ends, even a
        # disabled one. Within this one all micro-batches share the casts.
        with self._autocast(enabled=False):
            for x, y in zip(inputs[::2], inputs[1::2], strict=True):
                with self._autocast():
                    result = self.task.loss(self.task.body(x), y)
                loss, correct = result if isinstance(result, tuple) else (result, None)
                (loss / self.recipe.accumulate).backward()
                losses.append(loss.detach())
                corrects += [] if correct is None else [correct]
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip_norm)
        self._optimizer.step()
        return losses, corrects or None


class PipelineEngine(Engine):
    """Pipeline in this process, with one tick per micro-batch."""

    def __init__(self, recipe: Recipe, task: Task, schedule: Schedule) -> None:
        super().__init__(recipe, task, schedule)
        self.pipe = self._make_pipe(
            stages=recipe.stages,
            loss=task.loss,
            method=recipe.method,
            accumulate=recipe.accumulate,
            optimizer=lambda stage: make_optimizer(recipe, stage),
            lr_lambda=schedule,
            lr_by_delay=recipe.lr_by_delay,
            latency=recipe.latency,
            lookahead=recipe.lookahead,
            arithmetic=recipe.arithmetic,
            message_dtype=MESSAGES[recipe.message_dtype],
            clip_norm=recipe.clip_norm,
            seed=recipe.seed,
            capture=recipe.capture,
            example=task.train[0][0] if isinstance(recipe.stages, int) else None,
        )
        # Record the cut, so that a run resumes with the same stages in any number of processes.
        self.recipe = replace(recipe, stages=tuple(self.pipe.cut))
        if recipe.compile:
            self.pipe.compile(dynamic=False)
        self.probe = self.pipe.probe(every=recipe.probe_every) if recipe.probe_every else None
        self._num_traced = 0
        self.spans: Spans = {}
        """Start and end of each action of the traced ticks, in seconds."""

    def _make_pipe(self, **options: Any) -> Pipeline:
        return Pipeline(self.task.body, **options)

    def trace(self, num_ticks: int) -> None:
        """Time the next ticks; not on a GPU, where the host only queues the work."""
        if self.device.type == "cpu":
            self._num_traced = num_ticks

    @property
    def all_spans(self) -> Spans:
        """Spans of all stages, including those of other processes."""
        return self.spans

    def step(self, x: Tensor, y: Tensor) -> list[Metrics]:
        timer: AbstractContextManager[Spans] = nullcontext({})
        if self._num_traced:
            self._num_traced -= 1
            timer = measured_spans(self.pipe)
        with self._autocast(), timer as spans:
            tick = self.pipe.step(x, y)
        self.spans.update(spans)
        return [] if tick.loss is None else [Metrics(tick.loss, tick.aux)]

    def finish(self) -> list[Metrics]:
        ticks = self.pipe.flush(update=True)
        return [Metrics(tick.loss, tick.aux) for tick in ticks if tick.loss is not None]

    def evaluate(self) -> Score:
        with self._autocast():
            return self.task.evaluate(self.pipe.evaluate)

    def holdings(self) -> list[Holding] | None:
        full = self.pipe.schedule.num_in_flight
        return holdings(self.pipe) if self.pipe.num_in_flight >= full else None

    @property
    def num_updates(self) -> int:
        return self.pipe.stages[-1].num_updates

    def state_dict(self) -> dict[str, Any]:
        return self.pipe.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pipe.load_state_dict(state)
