"""Plan of a pipeline on devices that are not here: a table, a picture and a command."""

from dataclasses import dataclass

from redivider.checks.report import format_table
from redivider.errors import no_such
from redivider.models.catalogue import list_models
from redivider.models.summary import summarise_units
from redivider.pipeline.diagnostics.timeline import draw_spans
from redivider.pipeline.planner import METHODS, OURS, Choice, Cluster, Planner, UnitCosts
from redivider.pipeline.schedule import Action
from redivider.train.errors import TrainError

NAMES = {"1f1b": "1F1B", "zero-bubble": "zero bubble"}
MAX_DRAWN = 16


@dataclass(frozen=True)
class PipelinePlan:
    """Best pipeline of every method; the best of ours is the choice."""

    model: str
    choices: dict[str, Choice]
    devices: int

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
    def command(self) -> str:
        """Command that trains with the chosen pipeline; RECIPE is the user's."""
        own = self.chosen.candidate
        return (
            f"torchrun --nproc-per-node {self.devices} -m redivider train RECIPE "
            f"--model {self.model} --method {own.method} --stages {own.stages} "
            f"--replicas {own.replicas} --microbatch {own.microbatch} "
            f"--accumulate {own.accumulate} --latency {own.latency:g}"
        )

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.picture}\n\n{self.command}"

    def _row(self, name: str) -> list[str]:
        if name not in self.choices:
            return [NAMES.get(name, name), *["-"] * 8, "does not fit"]
        choice = self.choices[name]
        own, simulation = choice.candidate, choice.simulation
        return [
            NAMES.get(name, name) + (", recomputed" if own.recompute else ""),
            *map(str, (own.stages, own.replicas, own.microbatch, own.accumulate)),
            f"{own.latency:g}" if name in OURS else "-",
            f"{choice.throughput:.4g}",
            f"{simulation.idle:.1%}",
            f"{simulation.late:.2g}",
            f"{choice.memory / 2**30:.2f} GiB",
        ]


def plan_pipeline(
    model: str, cluster: Cluster, *, samples: int, max_late: float, flops: float
) -> PipelinePlan:
    """Choose a pipeline for a model of the catalogue.

    Args:
        model: Name of the model.
        cluster: The devices.
        samples: Samples of an update.
        max_late: Updates by which a gradient may be late.
        flops: FLOPs per second that a device reaches.
    """
    names = list_models()
    if model not in names:
        raise TrainError(no_such("model", model, names, "`redivider models` lists all"))
    units = summarise_units(model)
    costs = UnitCosts(
        seconds=tuple(unit.flops / flops for unit in units),
        kept=tuple(unit.kept for unit in units),
        graph=tuple(max(0, int(unit.graph)) for unit in units),
        output=tuple(unit.output for unit in units),
        weights=tuple(unit.weights for unit in units),
    )
    planner = Planner(costs, cluster, samples, max_late)
    choices = {name: planner.choose(name) for name in METHODS}
    fitting = {name: choice for name, choice in choices.items() if choice is not None}
    if not any(name in fitting for name in OURS):
        raise TrainError(
            f"no pipeline of {model} keeps the limits on {cluster.devices} devices; allow more "
            "memory or delay, or choose samples with more divisors"
        )
    return PipelinePlan(model, fitting, cluster.devices)
