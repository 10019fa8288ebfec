"""Engine of a pipeline over the processes of torchrun."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from redivider.initial import materialise
from redivider.pipeline.diagnostics.memory import Holding
from redivider.pipeline.diagnostics.timeline import Spans
from redivider.pipeline.distributed import DistributedPipeline
from redivider.pipeline.pipeline import Pipeline
from redivider.pipeline.schedule import Action
from redivider.train.engine import PipelineEngine
from redivider.train.processes import Ranks
from redivider.train.recipe import Recipe
from redivider.train.schedule import Schedule
from redivider.train.task import Score, Task


class DistributedEngine(PipelineEngine):
    """Stages of this process in a distributed pipeline, with one tick per micro-batch.

    Every replica takes micro-batches of its own.
    """

    pipe: DistributedPipeline

    def __init__(self, recipe: Recipe, task: Task, schedule: Schedule) -> None:
        super().__init__(recipe, task, schedule)
        self.processes = Ranks(self.pipe.team)
        if recipe.channels_last:
            for stage in self.pipe.stages:
                stage.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _make_pipe(self, **options: Any) -> Pipeline:
        recipe = self.recipe
        num = dist.get_world_size()
        if num % recipe.replicas:
            raise ValueError(f"{num} processes cannot be {recipe.replicas} replicas of a pipeline")
        places = num // recipe.replicas
        shape, names = (recipe.replicas, places), ("data", "stage")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if recipe.replicas > 1 else None
        is_last = dist.get_rank() % places == places - 1
        if is_last and self.task.body is not self.task.model:
            head = dict(list(self.task.model.named_children())[-1:])  # which is part of the loss
            materialise(head, seed=recipe.seed, device=self.device)
        return DistributedPipeline(
            self.task.body, mesh=mesh, device=self.device, timeout=recipe.timeout, **options
        )

    def batches(self, start: int) -> Iterator[tuple[Any, Any]]:
        team, num = self.pipe.team, self.recipe.replicas
        for step in count(start):
            # Only the first stage needs the input, and only the last one the target.
            if team.place in (0, team.num_places - 1):
                yield self.task.train[step * num + team.column]
            else:
                yield None, None

    def evaluate(self) -> Score:
        with self._autocast():
            score = self.task.evaluate(self.pipe.evaluate_here)
        fields = json.loads(self.processes.decide(lambda: json.dumps(asdict(score))))
        return Score(**fields)

    def holdings(self) -> list[Holding] | None:
        own = super().holdings()
        if own is None:
            return None
        by_rank = self.processes.gather([asdict(holding) for holding in own])
        # Replicas hold the same stages: the first replica's count.
        by_stage = {row["stage"]: Holding(**row) for rows in reversed(by_rank) for row in rows}
        return [holding for _, holding in sorted(by_stage.items())]

    @property
    def all_spans(self) -> Spans:
        by_rank = self.processes.gather([[*key, *span] for key, span in self.spans.items()])
        return {Action(*key): (start, end) for rows in by_rank for *key, start, end in rows}

    def state_dict(self) -> dict[str, Any]:
        return self.pipe.parts.to_write(self.pipe.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pipe.load_state_dict(self.pipe.parts.own(state))

    def wants(self, path: tuple[Any, ...]) -> bool:
        return self.pipe.parts.wants(path)

    def weights(self) -> dict[str, Tensor]:
        weights = self.pipe.full_state_dict()
        if self.task.body is not self.task.model and self.processes.sees_losses:
            name, head = list(self.task.model.named_children())[-1]
            weights |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
        return weights
