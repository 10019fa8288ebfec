"""Plan of a pipeline on devices that are not here: a table, a picture and a command."""

from dataclasses import dataclass

from redivider.checks.report import format_table
from redivider.models.catalogue import resolve
from redivider.models.options import OptionError
from redivider.models.summary import Fused, build, summarise_units
from redivider.pipeline.balance import measure_units
from redivider.pipeline.diagnostics.timeline import draw_spans
from redivider.pipeline.partition import units_of
from redivider.pipeline.planner import (
    METHODS,
    OURS,
    STATE,
    Choice,
    Cluster,
    Planner,
    UnitCosts,
)
from redivider.pipeline.schedule import Action
from redivider.train.errors import TrainError

NAMES = {"1f1b": "1F1B", "zero-bubble": "zero bubble"}
MAX_DRAWN = 16
BATCH = 8
"""Samples of the batch that is counted."""


@dataclass(frozen=True)
class PipelinePlan:
    """Best pipeline of every method; the best of ours is the choice."""

    model: str
    choices: dict[str, Choice]
    devices: int
    nodes: int
    options: dict[str, int]
    """Options of the model."""

    @property
    def chosen(self) -> Choice:
        """The fastest of our methods."""
        ours = [self.choices[name] for name in OURS if name in self.choices]
        return max(ours, key=lambda choice: choice.rank)

    @property
    def table(self) -> str:
        """Table with a row per method."""
        head = "method stages replicas micro-batch k latency samples/s idle late memory"
        return format_table([head.split(), *(self._row(name) for name in METHODS)])

    @property
    def picture(self) -> str:
        """Timeline from the first backward of stage 0 on, if the stages fit on a screen."""
        simulation = self.chosen.simulation
        if self.chosen.candidate.stages > MAX_DRAWN:
            return f"({self.chosen.candidate.stages} stages: --picture FILE draws them)"
        spans = simulation.timeline().spans
        first = spans[Action("B", 0, 0)][0]
        return draw_spans({action: span for action, span in spans.items() if span[0] >= first})

    @property
    def advice(self) -> str:
        """Sentences on rivals that reach more, and on what was counted."""
        chosen, lines = self.chosen, []
        for name in METHODS:
            rival = self.choices.get(name)
            if name in OURS or rival is None or rival.throughput <= chosen.throughput:
                continue
            more = rival.throughput / chosen.throughput - 1
            lines.append(
                f"{self._label(name)} reaches {more:.0%} more here, without late gradients."
            )
        if not lines:
            lines.append("No synchronous method reaches as much here.")
        size = "float32, per sample: " + self._input
        lines.append(f"Counted in {size}; {STATE} copies of the weights, as with Adam.")
        return "\n".join(lines)

    @property
    def _input(self) -> str:
        options = resolve(self.model, **self.options)[1]
        if hasattr(options, "image_size"):
            return f"an image of {options.image_size} x {options.image_size} pixels"
        return f"{options.example(1).shape[1]:,} tokens"

    @property
    def command(self) -> str:
        """Command that trains with the chosen pipeline; RECIPE is the user's."""
        own = self.chosen.candidate
        nodes = "" if self.nodes == 1 else f"--nnodes {self.nodes} --rdzv-backend c10d "
        nodes += "" if self.nodes == 1 else "--rdzv-endpoint HOST:29400 "
        options = "".join(f" {name} {value}" for name, value in self.options.items())
        return (
            f"torchrun {nodes}--nproc-per-node {self.devices // self.nodes} "
            f"-m redivider train RECIPE "
            f"--model {self.model} --method {own.method} --stages {own.stages} "
            f"--replicas {own.replicas} --microbatch {own.microbatch} "
            f"--accumulate {own.accumulate} --latency {own.latency:g}"
            + (f" --model-options{options}" if options else "")
        )

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.picture}\n\n{self.advice}\n\n{self.command}"

    def _label(self, name: str) -> str:
        own = self.choices[name].candidate
        label = NAMES.get(name, name) + (", recomputed" if own.recompute else "")
        return f"{label}, data parallel" if own.stages == 1 else label

    def _row(self, name: str) -> list[str]:
        if name not in self.choices:
            return [NAMES.get(name, name), *["-"] * 8, "does not fit"]
        choice = self.choices[name]
        own, simulation = choice.candidate, choice.simulation
        return [
            self._label(name),
            *map(str, (own.stages, own.replicas, own.microbatch, own.accumulate)),
            f"{own.latency:g}" if name in OURS else "-",
            f"{choice.throughput:.4g}",
            f"{simulation.idle:.1%}",
            f"{simulation.late:.2g}",
            f"{choice.memory / 2**30:.2f} GiB",
        ]


def plan_pipeline(
    model: str,
    cluster: Cluster,
    *,
    samples: int,
    max_late: float,
    flops: float,
    nodes: int = 1,
    **options: int,
) -> PipelinePlan:
    """Choose a pipeline for a model of the catalogue.

    Args:
        model: Name of the model.
        cluster: The devices.
        samples: Samples of an update.
        max_late: Updates by which a gradient may be late.
        flops: FLOPs per second that a device reaches.
        nodes: Machines that the devices are in.
        **options: Options of the model.
    """
    try:
        units = summarise_units(model, batch=BATCH, **options)
    except OptionError as error:
        raise TrainError(str(error)) from None
    network, x = build(model, BATCH, options)
    with Fused():
        sizes = measure_units(units_of(network), x, {})
    seconds = tuple(unit.flops / flops for unit in units)
    planner = Planner(UnitCosts(seconds, tuple(sizes), BATCH), cluster, samples, max_late)
    choices = {name: planner.choose(name) for name in METHODS}
    fitting = {name: choice for name, choice in choices.items() if choice is not None}
    if not any(name in fitting for name in OURS):
        raise TrainError(
            f"no pipeline of {model} keeps the limits on {cluster.devices} devices of "
            f"{cluster.memory / 2**30:,.3g} GiB; allow more memory or delay, or choose samples "
            "with more divisors"
        )
    return PipelinePlan(model, fitting, cluster.devices, nodes, options)
