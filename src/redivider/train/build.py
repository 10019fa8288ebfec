"""Build the data, the model and the engine of a recipe."""

from dataclasses import replace
from math import ceil
from pathlib import Path

import torch

from redivider.pipeline.runners.process_group import join, own_gpu
from redivider.train.distributed import DistributedEngine
from redivider.train.engine import BackpropEngine, Engine, PipelineEngine
from redivider.train.errors import SharedError, TrainError
from redivider.train.machine import resolve_device
from redivider.train.recipe import Recipe
from redivider.train.schedule import Schedule
from redivider.train.task import make_task
from redivider.train.torchrun import num_processes

ROUNDING = 1e-9  # tolerance for fractions of epochs


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe with its device and data folder resolved, to run the same elsewhere."""
    folder = recipe.data_folder
    return replace(
        recipe,
        device=str(resolve_device(recipe.device)),
        data_folder=None if folder is None else str(Path(folder).expanduser().absolute()),
    )


def build(recipe: Recipe) -> Engine:
    """Load the data, and make the model and its engine."""
    device = resolve_device(recipe.device)
    torch.manual_seed(recipe.seed)
    if num_processes() > 1:
        device = join_processes(recipe, device)
    elif recipe.replicas > 1:
        raise TrainError(
            f"{recipe.replicas} replicas need as many processes, or more: torchrun "
            f"--nproc-per-node {2 * recipe.replicas} -m redivider train ..."
        )
    try:
        task = make_task(recipe, device)
    except ValueError as error:  # of data and models; its message contains the remedy
        raise TrainError(str(error)) from error
    num_per_epoch = len(task.train) / (recipe.replicas * recipe.accumulate)
    total = num_microbatches(recipe, len(task.train) // recipe.replicas)
    schedule = Schedule(recipe, num_per_epoch, total // recipe.accumulate)
    engine: type[Engine] = BackpropEngine
    if recipe.is_pipeline:
        engine = PipelineEngine if num_processes() == 1 else DistributedEngine
    try:
        return engine(recipe, task, schedule)
    except ValueError as error:  # of pipelines
        raise SharedError(str(error)) from error


def join_processes(recipe: Recipe, device: torch.device) -> torch.device:
    """Join the process group of the run, and return the device of this process."""
    if not recipe.is_pipeline:
        raise SharedError(
            f"{recipe.method} runs in one process; use a pipeline's method, such as --method "
            "petra, or start it without torchrun"
        )
    if recipe.probe_every:
        raise SharedError("a probe needs the whole network in one process: --probe-every 0")
    if str(device) == "cuda":
        device = own_gpu()
    join(device, recipe.timeout)
    return device


def num_microbatches(recipe: Recipe, per_epoch: int) -> int:
    """Return the number of micro-batches of a run, rounded up to whole updates."""
    updates = recipe.epochs * per_epoch / recipe.accumulate
    # 1.1 * 100 is slightly more than 110 in floating point, and must not become 111.
    return ceil(updates - ROUNDING) * recipe.accumulate
