"""The training loop: any method over any model, seen while it runs, stopped and resumed exactly."""

import os
import time
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from pathlib import Path

import torch

import redivider
from redivider.pipeline.state import write_tensors
from redivider.train.checkpoint import Checkpoints
from redivider.train.engine import Engine, PipelineEngine, Seen, make_engine
from redivider.train.errors import TrainError
from redivider.train.log import Log
from redivider.train.machine import device_name, peak_memory, resolve_device
from redivider.train.progress import Progress
from redivider.train.recipe import Recipe
from redivider.train.runs import RECIPE, read_run
from redivider.train.schedule import Schedule
from redivider.train.stop import stopping
from redivider.train.task import Score, make_task

NUM_TRACED = 4  # ticks on the timeline of a report


class Stopped(Exception):
    """Somebody has asked the run to stop, and it is saved."""


@dataclass(frozen=True)
class Result:
    """What a run ends with."""

    folder: Path
    score: Score
    seconds: float


def train(recipe: Recipe, folder: Path, *, resume: bool = False) -> Result:
    """Train by a recipe; everything that is to be kept goes to the folder."""
    device = resolve_device(recipe.device)
    torch.manual_seed(recipe.seed)
    try:
        task = make_task(recipe, device)
        num_per_epoch = len(task.train) / recipe.accumulate
        num_updates = ceil(recipe.epochs * num_per_epoch)
        engine = make_engine(recipe, task, Schedule(recipe, num_per_epoch, num_updates))
    except ValueError as error:  # of data, models and pipelines, each saying what to do
        raise TrainError(str(error)) from error
    return Training(recipe, folder, engine, num_updates * recipe.accumulate).train(resume)


class Training:
    """A run in its folder, from beginning to end.

    Args:
        recipe: What to do.
        folder: Where to.
        engine: What does it.
        total: Micro-batches in all, whole updates.
    """

    def __init__(self, recipe: Recipe, folder: Path, engine: Engine, total: int) -> None:
        self._recipe, self._folder, self._engine, self._total = recipe, folder, engine, total
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._group = recipe.accumulate
        # Lines and checkpoints come between updates.
        self._every = ceil(recipe.log_every / self._group) * self._group
        self._step = 0
        self._seconds = 0.0  # of training, without evaluations and checkpoints
        self._seen: list[Seen] = []

    def train(self, resume: bool) -> Result:
        """Do all of it, or what is left of it."""
        if resume:
            self._restore()
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / RECIPE).write_text(self._recipe.to_json())
        self._log = Log(self._folder, since=self._step)
        self._bar = Progress(self._name, self._step, self._total, self._recipe.microbatch)
        try:
            run = read_run(self._folder)
            self._is_known, ended = bool(run.memory), run.end
            if ended:
                last = ended[-1]
                return Result(self._folder, Score(last["loss"], last["accuracy"]), last["seconds"])
            if not self._step:
                self._describe()
            return self._go_on()
        except OSError as error:
            reason = error.strerror or error
            raise TrainError(
                f"cannot write to {self._folder} ({reason}); make room there and resume"
            ) from error
        except FloatingPointError as error:
            raise TrainError(
                f"{error}; a lower lr, more warmup or a smaller clip_norm may help"
            ) from error
        finally:
            self._bar.close()
            self._log.close()

    def _go_on(self) -> Result:
        batches = self._engine.task.train.since(self._step)
        saved = time.monotonic()
        clock, mark = time.perf_counter(), (self._step, self._seconds)
        with stopping() as stop:
            while self._step < self._total:
                x, y = next(batches)
                self._seen += self._engine.step(x, y)
                self._step += 1
                self._bar.advance()
                if self._step % self._group:
                    continue
                is_line = self._step % self._every == 0 and self._step < self._total
                is_epoch = self._is_epoch()
                if not (is_line or is_epoch or stop.is_asked):
                    continue
                if is_line:
                    loss, accuracy = self._read()
                self._seconds += time.perf_counter() - clock
                if is_line:
                    self._write_line(loss, accuracy, mark)
                    mark = self._step, self._seconds
                    self._look_inside()
                if is_epoch:
                    self._evaluate()
                minutes = (time.monotonic() - saved) / 60
                if stop.is_asked:
                    self._stop()
                if is_line and minutes >= self._recipe.save_minutes:
                    self._save(optional=True)
                    saved = time.monotonic()
                clock = time.perf_counter()
            self._seen += self._engine.finish()
            if self._seen:
                loss, accuracy = self._read()
                self._seconds += time.perf_counter() - clock
                self._write_line(loss, accuracy, mark)
            self._look_inside()
        return self._end()

    def _end(self) -> Result:
        score = self._evaluate()
        self._save()
        self._write_weights()
        self._log.write("end", step=self._step, seconds=self._seconds, **asdict(score))
        return Result(self._folder, score, self._seconds)

    def _stop(self) -> None:
        if not all(bool(each.loss.isfinite()) for each in self._seen):
            raise TrainError("the loss is not a number; nothing was saved after that")
        self._save()
        raise Stopped(f"stopped after {self._step} micro-batches and saved")

    def _is_epoch(self) -> bool:
        """Whether an evaluation became due with the last update; one at the end comes anyway."""
        if self._step == self._total:
            return False
        per = self._recipe.evaluate_every * len(self._engine.task.train)
        return int(self._step / per) > int((self._step - self._group) / per)

    def _read(self) -> tuple[float, float | None]:
        """Means over what was seen since the last line; the device is waited for here."""
        if not self._seen:
            return float("nan"), None  # the pipeline fills
        loss = float(torch.stack([each.loss for each in self._seen]).double().mean())
        if not isfinite(loss):
            raise FloatingPointError(f"the loss is not a number before micro-batch {self._step}")
        correct = [each.correct for each in self._seen if each.correct is not None]
        num = len(correct) * self._recipe.microbatch
        self._seen = []
        return loss, float(torch.stack(correct).sum()) / num if num else None

    def _write_line(self, loss: float, accuracy: float | None, since: tuple[int, float]) -> None:
        updates = self._engine.num_updates
        step, seconds = self._step - since[0], self._seconds - since[1]
        row = {
            "step": self._step,
            "update": updates,
            "epoch": self._step / len(self._engine.task.train),
            "loss": loss,
            "accuracy": accuracy,
            "lr": self._recipe.lr * self._engine.schedule(max(0, updates - 1)),
            "samples_per_second": step * self._recipe.microbatch / max(seconds, 1e-9),
            "seconds": self._seconds,
            "memory": peak_memory(self._engine.device),
        }
        self._log.write("train", **row)
        self._bar.show(row)
        if isinstance(self._engine, PipelineEngine) and self._engine.probe is not None:
            for each in self._engine.probe.take():
                self._log.write("quality", step=self._step, **asdict(each))

    def _evaluate(self) -> Score:
        score = self._engine.evaluate()
        epoch = self._step / len(self._engine.task.train)
        row = {"step": self._step, "epoch": epoch, "seconds": self._seconds, **asdict(score)}
        self._log.write("evaluate", **row)
        accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.1%}"
        self._bar.tell(
            f"epoch {epoch:.4g}, {self._seconds:.0f} s: test loss {score.loss:.3f}{accuracy}"
        )
        return score

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

    def _look_inside(self) -> None:
        """Write down, once, what is held for the backward and how the ticks of a pipeline go."""
        engine = self._engine
        if isinstance(engine, PipelineEngine) and engine.spans:
            start = min(began for began, _ in engine.spans.values())
            spans = [[*each, a - start, b - start] for each, (a, b) in engine.spans.items()]
            self._log.write("timeline", step=self._step, spans=spans)
            engine.spans = {}
        held = None if self._is_known else engine.holdings()
        if held is not None:
            stages = [
                {"stage": h.stage, "activations": h.activations + h.messages, "weights": h.weights}
                for h in held
            ]
            self._log.write("memory", step=self._step, stages=stages)
            self._is_known = True
            if isinstance(engine, PipelineEngine):
                engine.trace(NUM_TRACED)

    def _save(self, *, optional: bool = False) -> None:
        state = {
            "engine": self._engine.state_dict(),
            "step": self._step,
            "seconds": self._seconds,
            "losses": [each.loss for each in self._seen],
            "correct": [each.correct for each in self._seen],
        }
        try:
            self._checkpoints.save(self._step, state)
        except TrainError as error:
            if not optional:
                raise
            self._bar.tell(f"warning: {error}")

    def _restore(self) -> None:
        self._checkpoints.clean()
        found = self._checkpoints.load()
        if found is None:
            return  # killed before the first one: from the beginning
        state = found[1]
        self._engine.load_state_dict(state["engine"])
        self._step, self._seconds = state["step"], state["seconds"]
        device = self._engine.device
        self._seen = [
            Seen(loss.to(device), None if right is None else right.to(device))
            for loss, right in zip(state["losses"], state["correct"], strict=True)
        ]

    def _write_weights(self) -> None:
        """The trained weights under the names of the model, for anyone to load."""
        new = self._folder / ".model.safetensors.new"
        write_tensors(new, self._engine.task.model.state_dict())
        os.replace(new, self._folder / "model.safetensors")

    @property
    def _name(self) -> str:
        return f"{self._recipe.name}, {self._recipe.method}"
