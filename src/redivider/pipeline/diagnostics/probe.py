"""Quality of a pipeline's gradients, stage by stage, measured while it trains.

When a stage runs the backward of a sampled micro-batch, its gradient is compared with two gradients
of plain backprop, with the same micro-batch and the same random numbers:

    end-to-end   with the weights that all stages have at that time
    delayed      with the weights that every stage used in its forward of the micro-batch

The stage's output, as rebuilt by the stage above, is compared with that of the forward. Buffers
that a forward changes have their current values. Rivaud et al. 2025 (PETRA), appendix B.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from redivider.arithmetic import Arithmetic
from redivider.errors import require
from redivider.pipeline.stages.loss import Loss
from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.stage import Stage
from redivider.pipeline.stages.unit import Unit
from redivider.tree import map_tensors, tensors_of

Grads: TypeAlias = list[Tensor | None]
NONE = float("nan")  # for what cannot be compared


@dataclass(frozen=True)
class Quality:
    """Quality of the gradient of one stage for one micro-batch; NaN where it cannot be compared.

    A cosine is that of the angle between two gradients, a ratio that of their norms.
    """

    stage: int
    microbatch: int
    num_updates: int
    """Updates of the stage before its backward of the micro-batch."""
    cosine: float
    """Cosine to the end-to-end gradient."""
    ratio: float
    cosine_to_delayed: float
    ratio_to_delayed: float
    cosine_of_delayed: float
    """Cosine of the delayed gradient to the end-to-end one."""
    ratio_of_delayed: float
    rebuilt_error: float
    """Error of the output as rebuilt by the stage above, relative to its norm."""


@dataclass
class _Sample:
    """Sampled micro-batch in flight."""

    message: Message
    weights: dict[Unit, list[Tensor]] = field(default_factory=dict)
    """Weights that the forward of each unit used."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Output of each stage's forward."""
    delayed: dict[Tensor, Tensor] | None = None
    """Delayed gradients, computed in the first backward."""


class Probe:
    """Sampler of the quality of gradients, made by `Pipeline.probe`.

    With J stages a sample takes about J forwards and J / 2 backwards of the whole network. Until
    its micro-batch has left, it holds a copy of the weights, one of the gradients, and the outputs
    of the stages.

    Args:
        stages: Stages of the pipeline.
        loss: Loss of the pipeline.
        arithmetic: Arithmetic of its streams.
        every: Number of micro-batches from one sample to the next.
    """

    def __init__(
        self, stages: Sequence[Stage], loss: Loss, arithmetic: Arithmetic, every: int
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every = every
        self._stages = stages
        self._loss = loss
        self._arithmetic = arithmetic
        self._samples: dict[int, _Sample] = {}
        # Stage, micro-batch, updates, and values that may still be on the device.
        self._measured: list[tuple[int, int, int, list[Any]]] = []

    @property
    def qualities(self) -> list[Quality]:
        """Measurements so far, in the order of time; reading them waits for the device."""
        return [Quality(*position, *map(float, values)) for *position, values in self._measured]

    @property
    def found(self) -> list[Quality]:
        """`qualities`, under the name that it had."""
        return self.qualities

    def take(self) -> list[Quality]:
        """Return the measurements since the last call, and drop them here."""
        qualities = self.qualities
        self._measured = []
        return qualities

    def enter(self, message: Message) -> None:
        """Sample a micro-batch that enters the pipeline, if it is due."""
        if message.microbatch % self.every == 0:
            self._samples[message.microbatch] = _Sample(message)

    @contextmanager
    def watching_forward(self, stage: Stage, microbatch: int) -> Iterator[dict[str, Message]]:
        """Surround a forward; its caller puts the message that it sends under "sent"."""
        sample, sent = self._samples.get(microbatch), dict[str, Message]()
        if sample is not None:
            for unit in stage.units:
                weights = stage.forward_weights(unit)
                sample.weights[unit] = [weight.detach().clone() for weight in weights]
        yield sent
        if sample is not None:
            value = sent["sent"].flow.value
            sample.outputs[stage.index] = map_tensors(Tensor.clone, value)

    @contextmanager
    def watching_backward(self, stage: Stage, message: Message) -> Iterator[None]:
        """Surround a backward, and compare the gradients that it adds."""
        n, value = message.microbatch, message.flow.value
        sample = self._samples.get(n)
        if sample is None:
            yield
            return
        error = _relative_error(value, sample.outputs.pop(stage.index))
        # Units may share weights: measure each parameter once, and subtract what it had before.
        params = list(dict.fromkeys(param for unit in stage.units for param in unit.parameters))
        before = [None if param.grad is None else param.grad.clone() for param in params]
        yield
        grads = [
            param.grad if param.grad is None or old is None else param.grad - old
            for param, old in zip(params, before, strict=True)
        ]
        if sample.delayed is None:
            sample.delayed = self._trace(sample, sample.weights.__getitem__, down_to=0)
        current = self._trace(sample, lambda unit: unit.parameters, down_to=stage.index)
        end_to_end = [current.get(param) for param in params]
        delayed = [sample.delayed.pop(param, None) for param in params]
        compared = [
            *_compare(grads, end_to_end),
            *_compare(grads, delayed),
            *_compare(delayed, end_to_end),
        ]
        if any(param.requires_grad for param in params):
            self._measured.append((stage.index, n, stage.num_updates, [*compared, error]))
        if stage.index == 0:
            del self._samples[n]

    def forget(self) -> None:
        """Drop the samples in flight, as when a state is loaded."""
        self._samples.clear()

    def __str__(self) -> str:
        """Return a table with a row per stage, averaged over samples, and its legend."""
        if not self._measured:
            return (
                f"no samples yet: one begins with every micro-batch whose number is a multiple of "
                f"{self.every}, and is measured in its backward"
            )
        lines = ["stage  samples  to end-to-end     to delayed        delayed to end   rebuilt"]
        lines.append("                cosine   ratio    cosine   ratio    cosine   ratio    error")
        for j, rows in self._by_stage().items():
            means = [mean(getattr(row, name) for row in rows) for name in _NAMES]
            numbers = "".join(f"{value:9.4f}" for value in means[:-1])
            lines.append(f"{j:5}  {len(rows):7} {numbers}  {means[-1]:.1e}")
        return "\n".join([*lines, _LEGEND])

    def plot(self, path: str | Path) -> None:
        """Draw cosines, ratios and errors by stage: means, and the range of all samples."""
        figure = require("matplotlib.figure", "a plot").Figure((12, 3.5), layout="tight")
        axes = figure.subplots(1, 3)
        by_stage = self._by_stage()
        for axis, title, names in (
            (axes[0], "cosine", ("cosine", "cosine_of_delayed", "cosine_to_delayed")),
            (axes[1], "ratio of norms", ("ratio", "ratio_of_delayed", "ratio_to_delayed")),
            (axes[2], "rebuilt output, relative error", ("rebuilt_error",)),
        ):
            for name in names:
                values = [[getattr(row, name) for row in rows] for rows in by_stage.values()]
                stages = list(by_stage)
                axis.plot(stages, [mean(v) for v in values], "o-", label=_LABELS[name])
                axis.fill_between(
                    stages, [min(v) for v in values], [max(v) for v in values], alpha=0.15
                )
            axis.set(title=title, xlabel="stage", xticks=list(by_stage))
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        axes[2].set_yscale("symlog", linthresh=1e-8)
        axes[2].set_ylim(bottom=0)
        figure.savefig(path)

    def _by_stage(self) -> dict[int, list[Quality]]:
        by_stage: dict[int, list[Quality]] = {}
        for row in sorted(self.qualities, key=lambda row: row.stage):
            by_stage.setdefault(row.stage, []).append(row)
        return by_stage

    def _trace(
        self, sample: _Sample, weights: Callable[[Unit], Sequence[Tensor]], down_to: int
    ) -> dict[Tensor, Tensor]:
        """Return the gradients of plain backprop, for all stages from the last one down to one.

        Return none if a stream leaves its grid: the pipeline itself will report that.
        """
        try:
            return self._trace_all(sample, weights, down_to)
        except ArithmeticError:
            return {}

    def _trace_all(
        self, sample: _Sample, weights: Callable[[Unit], Sequence[Tensor]], down_to: int
    ) -> dict[Tensor, Tensor]:
        message, pull_backs = sample.message, []
        n, flow, side = message.microbatch, message.flow, message.side
        with message.autocast.again():
            for unit in (unit for stage in self._stages for unit in stage.units):
                flow, pull_back = unit.trace(n, flow, side, weights(unit))
                pull_backs.append((unit, pull_back))
            last = Message(n, flow, message.autocast, side, message.target)
            grads = self._loss.trace(last, self._arithmetic)
        sums: dict[Tensor, Tensor] = {}
        num = sum(len(stage.units) for stage in self._stages[down_to:])
        for unit, pull_back in reversed(pull_backs[len(pull_backs) - num :]):
            grads, own = pull_back(grads)
            for param, grad in zip(unit.parameters, own, strict=True):
                if grad is not None:
                    sums[param] = sums[param] + grad if param in sums else grad
        return sums


_LEGEND = """
cosine, ratio   of the angle between two gradients, and of their norms: 1 if they are equal
to end-to-end   the pipeline's gradient against plain backprop's with all stages' current weights
to delayed      the same against plain backprop's with the weights of every stage's forward
delayed to end  the second of these against the first: what the delay alone changes
rebuilt error   of the stage's output as rebuilt by the stage above, relative to its norm
nan             nothing to compare: no gradient, or nothing was rebuilt"""
_NAMES = [item.name for item in fields(Quality) if item.type is float]
_LABELS = {
    "cosine": "pipeline to end-to-end",
    "cosine_of_delayed": "delayed to end-to-end",
    "cosine_to_delayed": "pipeline to delayed",
    "rebuilt_error": "as rebuilt by the stage above",
}
_LABELS |= {name.replace("cosine", "ratio"): label for name, label in _LABELS.items()}


def _compare(one: Grads, other: Grads) -> tuple[Any, Any]:
    """Return cosine and ratio of norms of two gradients, each taken as one long vector."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if not pairs:
        return NONE, NONE
    wide = [(a.detach().double(), b.detach().double()) for a, b in pairs]
    dot = sum((a * b).sum() for a, b in wide)
    squares = [sum(grad.square().sum() for grad in grads) for grads in zip(*wide, strict=True)]
    norms = [torch.as_tensor(square).sqrt() for square in squares]
    return dot / (norms[0] * norms[1]), norms[0] / norms[1]


def _relative_error(rebuilt: Any, true: Any) -> Any:
    pairs = list(zip(tensors_of(rebuilt), tensors_of(true), strict=False))
    if rebuilt is None or not pairs:
        return NONE  # nothing was rebuilt: the unit below has kept what it needs
    error = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return torch.as_tensor(error / size).sqrt()
