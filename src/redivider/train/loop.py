"""Training loop: any method and any model, with logs, exact stops and exact resumption."""

import platform
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from math import ceil, floor, isfinite, nan
from pathlib import Path
from typing import Any

import torch

import redivider
from redivider.coupling import Coupling
from redivider.data import DataError
from redivider.errors import Agreed
from redivider.files import atomic_write
from redivider.pipeline.checkpoint.files import StateError, write_tensors
from redivider.train.build import ROUNDING, build, num_microbatches, resolved
from redivider.train.checkpoint import Checkpoints
from redivider.train.clock import Clock
from redivider.train.engine import Engine, Metrics, PipelineEngine
from redivider.train.errors import SharedError, TrainError, check_installed
from redivider.train.log import Log, NoLog
from redivider.train.machine import (
    device_name,
    machine_name,
    peak_memory,
    report_out_of_memory,
    using_threads,
)
from redivider.train.progress import Progress
from redivider.train.recipe import Recipe
from redivider.train.recipe_warnings import find_warnings
from redivider.train.run_folder import claim, locked, write_whole, writing
from redivider.train.runs import LOG, RECIPE, WEIGHTS, read_run
from redivider.train.signals import Stop, catch_signals
from redivider.train.task import Score
from redivider.train.torchrun import is_restart, run_id

CHECKPOINTS = "checkpoints"
RUN_ID = ".torchrun"  # file with the id of the torchrun job that trains in a folder
NUM_TRACED = 4  # ticks on the timeline of a report


class Stopped(Agreed):
    """Run that was stopped by a signal, and can be resumed from its folder."""

    def __init__(self, reason: str, folder: Path) -> None:
        super().__init__(reason)
        self.folder = folder


@dataclass(frozen=True)
class Result:
    """Result of a run that has ended."""

    folder: Path
    score: Score
    seconds: float
    is_last: bool = False
    """Whether a signal came too late to stop the run: no other run should follow."""


def train(
    recipe: Recipe, folder: str | Path, *, resume: bool = False, numbered: bool = False
) -> Result:
    """Train by a recipe.

    Args:
        recipe: Recipe of the run.
        folder: Folder for the log, checkpoints and weights: a new one, or that of a run to resume.
        resume: Resume the run in the folder.
        numbered: If the folder exists, use one with a number instead.
    """
    check_installed("safetensors", "numpy")
    path = Path(folder)
    if recipe.compare:
        raise TrainError(
            f"{recipe.name} compares {', '.join(recipe.compare)}: redivider.train.compare.compare "
            "trains by all of them, and dataclasses.replace(recipe, compare=()) by its own method"
        )
    ended = _read_result(path) if resume else None
    if ended is not None:
        return ended
    recipe = resolved(recipe)
    with report_out_of_memory(recipe, recipe.device):
        engine = build(recipe)
    recipe, processes = engine.recipe, engine.processes
    with processes.guarding():
        if not resume and is_restart():
            # torchrun restarts the command as it was: resume the run of its earlier attempt.
            earlier = processes.decide(lambda: _find_attempt(path, numbered))
            path, resume = Path(earlier or path), bool(earlier)
            ended = _read_result(path) if resume and (path / LOG).exists() else None
            if ended is not None:
                return ended
        if not resume:
            with report_out_of_memory(recipe, engine.device):
                engine.prepare()
            text = recipe.to_json(engine.task.shape)
            path = Path(processes.decide(lambda: str(_make_folder(text, path, numbered))))
        with catch_signals() as stop:
            result = _train_in(path, recipe, engine, stop, resume)
        return replace(result, is_last=processes.any(stop.is_requested))


def _read_result(folder: Path) -> Result | None:
    """Return the result of a run that has ended, or None."""
    # A process that was killed before its first line has left a recipe without a log.
    has_log = (folder / RECIPE).exists() and (folder / LOG).exists()
    rows = read_run(folder).end if has_log else []
    if not rows:
        return None
    loss = rows[-1]["loss"]  # null for NaN, which JSON does not have
    score = Score(nan if loss is None else loss, rows[-1]["accuracy"])
    return Result(folder, score, rows[-1]["seconds"])


def _make_folder(recipe: str, folder: Path, numbered: bool) -> Path:
    folder = claim(folder, numbered=numbered)
    if run_id():
        write_whole(folder / RUN_ID, run_id())
    write_whole(folder / RECIPE, recipe)
    return folder


def _train_in(folder: Path, recipe: Recipe, engine: Engine, stop: Stop, resume: bool) -> Result:
    lock = locked(folder) if engine.processes.is_writer else nullcontext()
    with lock, using_threads(recipe.threads):
        try:
            with report_out_of_memory(recipe, engine.device):
                return Training(recipe, folder, engine, stop).train(resume)
        except KeyboardInterrupt:
            saved = any((folder / CHECKPOINTS).glob("*"))
            state = "with what was last saved" if saved else "before anything was saved"
            raise Stopped(f"interrupted, {state}", folder) from None
        except DataError as error:
            raise TrainError(str(error)) from error
        except FloatingPointError as error:
            raise TrainError(
                f"{error}; a lower lr, more warmup or a smaller clip_norm may help"
            ) from error


def _find_attempt(folder: Path, numbered: bool) -> str:
    """Return the folder of an earlier attempt of this torchrun job, or an empty string."""
    others = folder.parent.glob(f"{folder.name}-*") if numbered else ()
    for path in (folder, *others):
        mark = path / RUN_ID
        if mark.exists() and mark.read_text() == run_id() and (path / RECIPE).exists():
            return str(path)
    return ""


class Training:
    """Run in its folder, from start to end.

    Args:
        recipe: Recipe of the run.
        folder: Folder of the run.
        engine: Engine that trains the model.
        stop: Request to stop, which a signal may set at any time.
    """

    def __init__(self, recipe: Recipe, folder: Path, engine: Engine, stop: Stop) -> None:
        self._recipe, self._folder, self._engine, self._stop = recipe, folder, engine, stop
        self._processes = engine.processes
        self._checkpoints = Checkpoints(folder / CHECKPOINTS, self._processes.writers)
        self._clock = Clock(engine.device)
        # Lines and checkpoints come between updates: round up to whole updates.
        self._log_every = ceil(recipe.log_every / recipe.accumulate) * recipe.accumulate
        self._per_epoch = len(engine.task.train) // recipe.replicas
        self._total = num_microbatches(recipe, self._per_epoch)
        self._step = 0
        self._metrics: list[Metrics] = []  # since the last line of the log

    def train(self, resume: bool) -> Result:
        """Train from the start, or resume from the last checkpoint."""
        seconds = self._restore() if resume else None
        self._engine.prepare()  # a run that was killed before its first checkpoint has no plan
        is_writer, resume_step = self._processes.is_writer, None if seconds is None else self._step
        self._log = Log(self._folder, resume_step=resume_step) if is_writer else NoLog()
        self._bar = Progress(
            f"{self._recipe.name}, {self._recipe.method}",
            self._step,
            self._total,
            self._recipe.microbatch * self._recipe.replicas,
            is_quiet=not is_writer,
        )
        try:
            # Only the writer has the log, and all processes must take the same branches.
            run = read_run(self._folder) if is_writer else None
            self._has_memory = self._processes.any(run is not None and bool(run.memory))
            self._has_timeline = self._processes.any(run is not None and bool(run.timeline))
            if not self._step:
                self._describe()
            self._clock.start(seconds or 0.0)
            self._run()
            return self._end()
        finally:
            self._bar.close()
            self._log.close()

    def _run(self) -> None:
        batches = self._engine.batches(self._step)
        saved_at = time.monotonic()
        self._last_line = self._step, self._clock.seconds
        while self._step < self._total:
            self._metrics += self._engine.step(*next(batches))
            self._step += 1
            self._bar.advance()
            if self._step % self._recipe.accumulate or self._step == self._total:
                continue
            logs = self._step % self._log_every == 0
            evaluates = self._is_evaluation_due()
            stops = self._processes.should_stop(self._stop.is_requested, self._step)
            if not (logs or evaluates or stops or not self._has_memory):
                continue
            with self._clock.paused():
                if logs:
                    self._write_line()
                self._write_diagnostics()
                if evaluates:
                    self._write_score(self._engine.evaluate())
                if stops:
                    self._save_and_stop()
                if logs and self._processes.any(
                    time.monotonic() - saved_at >= 60 * self._recipe.save_minutes
                ):
                    self._save(optional=True)
                    saved_at = time.monotonic()
        self._metrics += self._engine.finish()

    def _end(self) -> Result:
        """Save, evaluate, and write the weights and the last lines.

        The checkpoint comes first: a resumed run can repeat all that follows.
        """
        with self._clock.paused():
            if self._processes.any(bool(self._metrics)):
                self._write_line()
            self._write_diagnostics()
            self._save()
            score = self._engine.evaluate()
            self._write_weights()
            self._write_score(score)
            seconds = self._clock.seconds
            self._log.write("end", step=self._step, seconds=seconds, **asdict(score))
        return Result(self._folder, score, seconds)

    def _save_and_stop(self) -> None:
        if not all(bool(metrics.loss.isfinite()) for metrics in self._metrics):
            raise FloatingPointError("the loss is NaN or infinite; nothing was saved after that")
        self._write_quality()
        self._save()
        raise Stopped(f"stopped after {self._step} micro-batches and saved", self._folder)

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation became due with the last update."""
        interval = self._recipe.evaluate_every * self._per_epoch
        now, before = self._step / interval, (self._step - self._recipe.accumulate) / interval
        return floor(now + ROUNDING) > floor(before + ROUNDING)

    def _take_means(self) -> tuple[float, float | None]:
        """Return mean loss and accuracy since the last line, and reset them.

        This waits for the device.
        """
        if not self._metrics:
            return nan, None  # the pipeline is filling
        loss = float(torch.stack([metrics.loss for metrics in self._metrics]).double().mean())
        if not isfinite(loss):
            raise FloatingPointError(f"the loss is NaN or infinite before micro-batch {self._step}")
        correct = [metrics.correct for metrics in self._metrics if metrics.correct is not None]
        num = len(correct) * self._recipe.microbatch
        self._metrics = []
        return loss, float(torch.stack(correct).sum()) / num if num else None

    def _write_line(self) -> None:
        loss, accuracy = map(self._processes.mean, self._take_means())
        updates, seconds = self._engine.num_updates, self._clock.seconds
        num = (self._step - self._last_line[0]) * self._recipe.microbatch * self._recipe.replicas
        row = {
            "step": self._step,
            "update": updates,
            "epoch": self._step / self._per_epoch,
            "loss": loss,
            "accuracy": accuracy,
            "lr": self._recipe.lr * self._engine.schedule(max(0, updates - 1)),
            "samples_per_second": num / max(seconds - self._last_line[1], 1e-9),
            "seconds": seconds,
            "memory": peak_memory(self._engine.device),
        }
        self._last_line = self._step, seconds
        self._log.write("train", **row)
        self._bar.show(row)
        self._write_quality()

    def _write_quality(self) -> None:
        if isinstance(self._engine, PipelineEngine) and self._engine.probe is not None:
            for sample in self._engine.probe.take():
                self._log.write("quality", step=self._step, **asdict(sample))

    def _write_score(self, score: Score) -> None:
        epoch, seconds = self._step / self._per_epoch, self._clock.seconds
        row = {"step": self._step, "epoch": epoch, "seconds": seconds, **asdict(score)}
        self._log.write("evaluate", **row)
        accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.1%}"
        self._bar.tell(f"epoch {epoch:.4g}, {seconds:.0f} s: test loss {score.loss:.3f}{accuracy}")

    def _describe(self) -> None:
        """Log and print the model, data and device, and print warnings about the recipe."""
        engine = self._engine
        num = sum(param.numel() for param in engine.task.model.parameters())
        cut = engine.pipe.cut if isinstance(engine, PipelineEngine) else None
        self._log.write(
            "start",
            step=0,
            date=datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
            machine=machine_name(),
            device=device_name(engine.device),
            version=redivider.__version__,
            torch=torch.__version__,
            python=platform.python_version(),
            num_parameters=num,
            cut=cut,
            plan=None if engine.plan is None else list(engine.plan),
        )
        stages = f", {len(cut)} stages" if cut else ""
        self._bar.tell(
            f"{self._recipe.model}, {num:,} parameters{stages}, {self._recipe.data}, "
            f"{self._total} micro-batches of {self._recipe.microbatch}, on {engine.device}; "
            f"{self._folder}"
        )
        if engine.plan is not None:
            self._bar.tell(f"plan: {engine.plan.summary}")
        reverses = any(isinstance(unit, Coupling) for unit in engine.task.body.units())
        num_stages = len(cut) if cut else 1
        for warning in find_warnings(self._recipe, self._per_epoch, num_stages, reverses):
            self._bar.tell(f"warning: {warning}")

    def _write_diagnostics(self) -> None:
        """Log, once per run, the memory held for the backward and the timeline of a pipeline."""
        engine = self._engine
        held = None if self._has_memory else engine.holdings()
        if held is not None:
            stages = [
                {"stage": h.stage, "activations": h.activations + h.messages, "weights": h.weights}
                for h in held
            ]
            self._log.write("memory", step=self._step, stages=stages)
            self._has_memory = True
        if not isinstance(engine, PipelineEngine) or self._has_timeline or not self._has_memory:
            return
        # The first call requests the trace; a later one finds it.
        if engine.spans:
            by_action = engine.all_spans
            origin = min(start for start, _ in by_action.values())
            spans = [
                [*action, start - origin, end - origin]
                for action, (start, end) in by_action.items()
            ]
            self._log.write("timeline", step=self._step, spans=spans)
            self._has_timeline = True
        else:
            engine.trace(NUM_TRACED)

    def _save(self, *, optional: bool = False) -> None:
        """Write a checkpoint; refuse weights that are not finite.

        Args:
            optional: Only warn if it cannot be written.
        """
        # Parameters of other processes' stages are on the meta device.
        params = [param for param in self._engine.task.model.parameters() if not param.is_meta]
        if not all(bool(param.detach().isfinite().all()) for param in params):
            raise FloatingPointError(f"weights are not finite after micro-batch {self._step}")
        state: dict[str, Any] = {"engine": self._engine.state_dict()}
        if self._processes.sees_losses:
            pairs = [[metrics.loss, metrics.correct] for metrics in self._metrics]
            state["seen"] = {self._processes.column: pairs}
        if self._processes.is_writer:
            state |= {"step": self._step, "seconds": self._clock.seconds}
        try:
            self._checkpoints.save(self._step, state)
        except TrainError as error:
            if not optional:
                raise
            self._bar.tell(f"warning: {error}")

    def _restore(self) -> float | None:
        """Load the last checkpoint and return its seconds of training, or None without one."""
        state = self._checkpoints.load(self._wants)
        if state is None:
            return None  # killed before the first checkpoint: start anew
        try:
            self._engine.load_state_dict(state["engine"])
        except StateError as error:
            raise SharedError(f"the checkpoint does not fit: {error}") from error
        self._step = state["step"]
        device = self._engine.device
        self._metrics = [
            Metrics(loss.to(device), None if correct is None else correct.to(device))
            for loss, correct in state["seen"][self._processes.column]
            if self._processes.sees_losses
        ]
        return float(state["seconds"])

    def _wants(self, path: tuple[Any, ...]) -> bool:
        """Return whether this process needs the part of a checkpoint under these keys."""
        return path[0] != "engine" or len(path) == 1 or self._engine.wants(path[1:])

    def _write_weights(self) -> None:
        """Write the trained weights as safetensors, under the names of the model."""
        # All processes take part in collecting the weights, and one writes them.
        weights = self._engine.weights()
        if self._processes.is_writer:
            with writing(self._folder), atomic_write(self._folder / WEIGHTS) as new:
                write_tensors(new, weights)
