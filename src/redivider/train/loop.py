"""The training loop: any method over any model, seen while it runs, stopped and resumed exactly."""

import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import ceil, floor, isfinite, nan
from pathlib import Path
from typing import Any

import torch

import redivider
from redivider.coupling import Coupling
from redivider.data import DataError
from redivider.pipeline.checkpoint.files import StateError, write_tensors
from redivider.train.build import ROUNDING, build, num_microbatches, resolved
from redivider.train.checkpoint import Checkpoints
from redivider.train.clock import Clock
from redivider.train.crew import said_once
from redivider.train.doubts import doubts
from redivider.train.engine import Engine, PipelineEngine, Seen
from redivider.train.errors import TrainError, need
from redivider.train.folder import claim, locked, write_whole, writing
from redivider.train.log import Log, NoLog
from redivider.train.machine import device_name, peak_memory, using_threads, within_memory
from redivider.train.progress import Progress
from redivider.train.recipe import Recipe
from redivider.train.runs import LOG, RECIPE, read_run
from redivider.train.stop import Stop, stopping
from redivider.train.task import Score
from redivider.train.torchrun import is_restart, run_id

CHECKPOINTS = "checkpoints"
RUN_ID = ".torchrun"  # whose attempts go on in a folder
NUM_TRACED = 4  # ticks on the timeline of a report


class Stopped(Exception):
    """Somebody has asked the run to stop, and it is saved."""

    is_agreed = True
    """All processes have it: none of them has failed."""

    def __init__(self, what: str, folder: Path) -> None:
        super().__init__(what)
        self.folder = folder


@dataclass(frozen=True)
class Result:
    """What a run ends with."""

    folder: Path
    score: Score
    seconds: float
    is_last: bool = False
    """Whether somebody asked it to stop when it had all but ended: no other run should follow."""


def train(
    recipe: Recipe, folder: str | Path, *, resume: bool = False, numbered: bool = False
) -> Result:
    """Train by a recipe.

    Args:
        recipe: What to do.
        folder: Where all that is to be kept goes: a new folder, or that of a run to go on with.
        resume: Go on with that run.
        numbered: Take a folder with a number instead, if this one is there already.
    """
    need("safetensors", "numpy")
    place = Path(folder)
    if recipe.compare:
        raise TrainError(
            f"{recipe.name} compares {', '.join(recipe.compare)}: redivider.train.compare.compare "
            "trains by all of them, and dataclasses.replace(recipe, compare=()) by its own method"
        )
    ended = _find_end(place) if resume else None
    if ended is not None:
        return ended
    recipe = resolved(recipe)
    with within_memory(recipe, recipe.device):
        engine = build(recipe)
    recipe, crew = engine.recipe, engine.crew
    with crew.guarding():
        if not resume and is_restart():
            found = crew.decide(lambda: _find_begun(place, numbered))
            place, resume = Path(found or place), bool(found)
            ended = _find_end(place) if resume and (place / LOG).exists() else None
            if ended is not None:
                return ended
        if not resume:
            place = Path(crew.decide(lambda: str(_begin(recipe, place, numbered))))
        with stopping() as stop:
            result = _train_in(place, recipe, engine, stop, resume)
        return replace(result, is_last=crew.agrees(stop.is_asked))


def _find_end(folder: Path) -> Result | None:
    """What a run has ended with, if it has."""
    is_begun = (folder / RECIPE).exists() and (folder / LOG).exists()  # killed between them
    ended = read_run(folder).end if is_begun else []
    if not ended:
        return None
    score = Score(_number(ended[-1]["loss"]), ended[-1]["accuracy"])
    return Result(folder, score, ended[-1]["seconds"])


def _begin(recipe: Recipe, folder: Path, numbered: bool) -> Path:
    folder = claim(folder, numbered=numbered)
    if run_id():
        write_whole(folder / RUN_ID, run_id())
    write_whole(folder / RECIPE, recipe.to_json())
    return folder


def _train_in(folder: Path, recipe: Recipe, engine: Engine, stop: Stop, resume: bool) -> Result:
    alone = locked(folder) if engine.crew.is_writer else nullcontext()
    with alone, using_threads(recipe.threads):
        try:
            with within_memory(recipe, engine.device):
                return Training(recipe, folder, engine, stop).train(resume)
        except KeyboardInterrupt:
            saved = any((folder / CHECKPOINTS).glob("*"))
            what = "with what was last saved" if saved else "before anything was saved"
            raise Stopped(f"interrupted, {what}", folder) from None
        except DataError as error:
            raise TrainError(str(error)) from error
        except FloatingPointError as error:
            raise TrainError(
                f"{error}; a lower lr, more warmup or a smaller clip_norm may help"
            ) from error


def _find_begun(folder: Path, numbered: bool) -> str:
    """Where an earlier attempt of this torchrun has begun, if it has."""
    others = folder.parent.glob(f"{folder.name}-*") if numbered else ()
    for each in (folder, *others):
        mark = each / RUN_ID
        if mark.exists() and mark.read_text() == run_id() and (each / RECIPE).exists():
            return str(each)
    return ""


class Training:
    """A run in its folder, from beginning to end.

    Args:
        recipe: What to do.
        folder: Where to.
        engine: What does it.
        stop: Whether somebody wants it to stop.
    """

    def __init__(self, recipe: Recipe, folder: Path, engine: Engine, stop: Stop) -> None:
        self._recipe, self._folder, self._engine, self._stop = recipe, folder, engine, stop
        self._crew = engine.crew
        self._checkpoints = Checkpoints(folder / CHECKPOINTS, self._crew.writers)
        self._clock = Clock(engine.device)
        self._group = recipe.accumulate
        # Lines and checkpoints come between updates.
        self._every = ceil(recipe.log_every / self._group) * self._group
        self._per_epoch = len(engine.task.train) // recipe.replicas
        self._total = num_microbatches(recipe, self._per_epoch)
        self._step = 0
        self._seen: list[Seen] = []

    def train(self, resume: bool) -> Result:
        """Do all of it, or what is left of it."""
        seconds = self._restore() if resume else None
        is_writer, since = self._crew.is_writer, None if seconds is None else self._step
        self._log = Log(self._folder, since=since) if is_writer else NoLog()
        self._bar = Progress(
            f"{self._recipe.name}, {self._recipe.method}",
            self._step,
            self._total,
            self._recipe.microbatch * self._recipe.replicas,
            is_quiet=not is_writer,
        )
        try:
            run = read_run(self._folder) if is_writer else None
            self._is_known = self._crew.agrees(run is not None and bool(run.memory))
            self._is_traced = self._crew.agrees(run is not None and bool(run.timeline))
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
        saved = time.monotonic()
        self._mark = self._step, self._clock.seconds
        while self._step < self._total:
            self._seen += self._engine.step(*next(batches))
            self._step += 1
            self._bar.advance()
            if self._step % self._group or self._step == self._total:
                continue
            is_line = self._step % self._every == 0
            is_epoch = self._is_epoch()
            stops = self._crew.stops(self._stop.is_asked, self._step)
            if not (is_line or is_epoch or stops or not self._is_known):
                continue
            with self._clock.stopped():
                if is_line:
                    self._write_line()
                self._look_inside()
                if is_epoch:
                    self._write_score(self._engine.evaluate())
                if stops:
                    self._leave()
                if is_line and self._crew.agrees(
                    time.monotonic() - saved >= 60 * self._recipe.save_minutes
                ):
                    self._save(optional=True)
                    saved = time.monotonic()
        self._seen += self._engine.finish()

    def _end(self) -> Result:
        """Save before anything else: what follows can be done again."""
        with self._clock.stopped():
            if self._crew.agrees(bool(self._seen)):
                self._write_line()
            self._look_inside()
            self._save()
            score = self._engine.evaluate()
            self._write_weights()
            self._write_score(score)
            seconds = self._clock.seconds
            self._log.write("end", step=self._step, seconds=seconds, **asdict(score))
        return Result(self._folder, score, seconds)

    def _leave(self) -> None:
        if not all(bool(each.loss.isfinite()) for each in self._seen):
            raise FloatingPointError("the loss is not a number; nothing was saved after that")
        self._write_quality()
        self._save()
        raise Stopped(f"stopped after {self._step} micro-batches and saved", self._folder)

    def _is_epoch(self) -> bool:
        """Whether an evaluation became due with the last update."""
        per = self._recipe.evaluate_every * self._per_epoch
        now, before = self._step / per, (self._step - self._group) / per
        return floor(now + ROUNDING) > floor(before + ROUNDING)

    def _read(self) -> tuple[float, float | None]:
        """Means over what was seen since the last line; the device is waited for here."""
        if not self._seen:
            return nan, None  # the pipeline fills
        loss = float(torch.stack([each.loss for each in self._seen]).double().mean())
        if not isfinite(loss):
            raise FloatingPointError(f"the loss is not a number before micro-batch {self._step}")
        correct = [each.correct for each in self._seen if each.correct is not None]
        num = len(correct) * self._recipe.microbatch
        self._seen = []
        return loss, float(torch.stack(correct).sum()) / num if num else None

    def _write_line(self) -> None:
        loss, accuracy = map(self._crew.mean, self._read())
        updates, seconds = self._engine.num_updates, self._clock.seconds
        num = (self._step - self._mark[0]) * self._recipe.microbatch * self._recipe.replicas
        row = {
            "step": self._step,
            "update": updates,
            "epoch": self._step / self._per_epoch,
            "loss": loss,
            "accuracy": accuracy,
            "lr": self._recipe.lr * self._engine.schedule(max(0, updates - 1)),
            "samples_per_second": num / max(seconds - self._mark[1], 1e-9),
            "seconds": seconds,
            "memory": peak_memory(self._engine.device),
        }
        self._mark = self._step, seconds
        self._log.write("train", **row)
        self._bar.show(row)
        self._write_quality()

    def _write_quality(self) -> None:
        if isinstance(self._engine, PipelineEngine) and self._engine.probe is not None:
            for each in self._engine.probe.take():
                self._log.write("quality", step=self._step, **asdict(each))

    def _write_score(self, score: Score) -> None:
        epoch, seconds = self._step / self._per_epoch, self._clock.seconds
        row = {"step": self._step, "epoch": epoch, "seconds": seconds, **asdict(score)}
        self._log.write("evaluate", **row)
        accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.1%}"
        self._bar.tell(f"epoch {epoch:.4g}, {seconds:.0f} s: test loss {score.loss:.3f}{accuracy}")

    def _describe(self) -> None:
        """Say what is trained."""
        engine = self._engine
        num = sum(each.numel() for each in engine.task.model.parameters())
        cut = engine.pipe.cut if isinstance(engine, PipelineEngine) else None
        self._log.write(
            "start",
            step=0,
            version=redivider.__version__,
            torch=torch.__version__,
            device=device_name(engine.device),
            num_parameters=num,
            cut=cut,
        )
        stages = f", {len(cut)} stages" if cut else ""
        self._bar.tell(
            f"{self._recipe.model}, {num:,} parameters{stages}, {self._recipe.data}, "
            f"{self._total} micro-batches of {self._recipe.microbatch}, on {engine.device}; "
            f"{self._folder}"
        )
        reverses = any(isinstance(each, Coupling) for each in engine.task.body.units())
        for each in doubts(self._recipe, self._per_epoch, len(cut) if cut else 1, reverses):
            self._bar.tell(f"warning: {each}")

    def _look_inside(self) -> None:
        """Write down, once, what is held for the backward and how the ticks of a pipeline go."""
        engine = self._engine
        held = None if self._is_known else engine.holdings()
        if held is not None:
            stages = [
                {"stage": h.stage, "activations": h.activations + h.messages, "weights": h.weights}
                for h in held
            ]
            self._log.write("memory", step=self._step, stages=stages)
            self._is_known = True
        if not isinstance(engine, PipelineEngine) or self._is_traced or not self._is_known:
            return
        if engine.spans:
            found = engine.all_spans
            start = min(began for began, _ in found.values())
            spans = [[*each, a - start, b - start] for each, (a, b) in found.items()]
            self._log.write("timeline", step=self._step, spans=spans)
            self._is_traced = True
        else:
            engine.trace(NUM_TRACED)

    def _save(self, *, optional: bool = False) -> None:
        """Write a checkpoint, but for weights that nobody could go on with."""
        weights = [each for each in self._engine.task.model.parameters() if not each.is_meta]
        if not all(bool(each.detach().isfinite().all()) for each in weights):
            raise FloatingPointError(f"weights are not finite after micro-batch {self._step}")
        state: dict[str, Any] = {"engine": self._engine.state_dict()}
        if self._crew.sees_losses:
            seen = [[each.loss, each.correct] for each in self._seen]
            state["seen"] = {self._crew.column: seen}
        if self._crew.is_writer:
            state |= {"step": self._step, "seconds": self._clock.seconds}
        try:
            self._checkpoints.save(self._step, state)
        except TrainError as error:
            if not optional:
                raise
            self._bar.tell(f"warning: {error}")

    def _restore(self) -> float | None:
        """Go on from the last checkpoint; the seconds of training until then, if there is one."""
        found = self._checkpoints.load(self._wants)
        if found is None:
            return None  # killed before the first one: from the beginning
        state: dict[str, Any] = found
        try:
            self._engine.load_state_dict(state["engine"])
        except StateError as error:
            raise said_once(TrainError(f"the checkpoint does not fit: {error}")) from error
        self._step = state["step"]
        device = self._engine.device
        self._seen = [
            Seen(loss.to(device), None if right is None else right.to(device))
            for loss, right in state["seen"][self._crew.column]
            if self._crew.sees_losses
        ]
        return float(state["seconds"])

    def _wants(self, path: tuple[Any, ...]) -> bool:
        """Whether a part of a checkpoint is of use to this process."""
        return path[0] != "engine" or len(path) == 1 or self._engine.wants(path[1:])

    def _write_weights(self) -> None:
        """The trained weights under the names of the model, for anyone to load."""
        new, weights = self._folder / ".model.safetensors.new", self._engine.weights()
        if self._crew.is_writer:
            with writing(self._folder):
                write_tensors(new, weights)
                os.replace(new, self._folder / "model.safetensors")


def _number(value: float | None) -> float:
    """JSON has no NaN."""
    return nan if value is None else value
