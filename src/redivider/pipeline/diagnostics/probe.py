"""How good a pipeline's gradient is, stage by stage, measured while it trains.

When a stage takes a sampled micro-batch back, the gradient that it finds is compared with two that
plain backprop finds for the same micro-batch, the same random numbers, and

    end-to-end   the weights that all stages have at that time
    delayed      the weights that every stage used in its forward of it

and its output, as rebuilt by the stage above, with that of the forward. Buffers that a forward
moves are as they are now. Rivaud et al. 2025 (PETRA), appendix B.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from redivider.arithmetic import Arithmetic
from redivider.errors import require
from redivider.pipeline.stages.loss import Loss
from redivider.pipeline.stages.stage import Message, Stage
from redivider.pipeline.stages.unit import Unit

Grads: TypeAlias = list[Tensor | None]
NONE = float("nan")


@dataclass(frozen=True)
class Quality:
    """The gradient of one stage for one micro-batch; what cannot be compared is NaN.

    A cosine is that of the angle between two gradients, a ratio that of their norms.
    """

    stage: int
    microbatch: int
    num_updates: int
    """Of the stage, when it took the micro-batch back."""
    cosine: float
    """To the end-to-end gradient."""
    ratio: float
    cosine_to_delayed: float
    ratio_to_delayed: float
    cosine_of_delayed: float
    """Of the delayed gradient to the end-to-end one."""
    ratio_of_delayed: float
    rebuilt_error: float
    """Of the output as rebuilt by the stage above, relative to its norm."""


@dataclass
class _Sample:
    message: Message
    weights: dict[Unit, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    delayed: dict[Tensor, Tensor] | None = None


class Probe:
    """Samples the quality of gradients; `Pipeline.probe` makes one.

    A sample of J stages takes about J forwards and J / 2 backwards of the whole network, and until
    the micro-batch has left a copy of the weights, one of the gradients, and the stages' outputs.

    Args:
        stages: Of the pipeline.
        loss: At its end.
        arithmetic: Of its streams.
        every: How many micro-batches lie between two samples.
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
        self._found: list[tuple[int, int, int, list[Any]]] = []

    @property
    def found(self) -> list[Quality]:
        """What was measured so far, in the order of time; waits for the device."""
        return [Quality(*places, *map(float, values)) for *places, values in self._found]

    def take(self) -> list[Quality]:
        """What was measured since it was last taken; it is not kept here."""
        found = self.found
        self._found = []
        return found

    def enter(self, message: Message) -> None:
        """A micro-batch enters the pipeline."""
        if message.microbatch % self.every == 0:
            self._samples[message.microbatch] = _Sample(message)

    @contextmanager
    def watching_forward(self, stage: Stage, microbatch: int) -> Iterator[dict[str, Message]]:
        """Surround a forward, which puts the message that it sends under "sent"."""
        sample, sent = self._samples.get(microbatch), dict[str, Message]()
        if sample is not None:
            for unit in stage.units:
                used = stage.forward_weights(unit)
                sample.weights[unit] = [each.detach().clone() for each in used]
        yield sent
        if sample is not None:
            value = sent["sent"].flow.value
            sample.outputs[stage.index] = tree_map_only(Tensor, Tensor.clone, value)

    @contextmanager
    def watching_backward(self, stage: Stage, message: Message) -> Iterator[None]:
        """Surround a backward: compare what it adds to the gradients."""
        n, value = message.microbatch, message.flow.value
        sample = self._samples.get(n)
        if sample is None:
            yield
            return
        error = _relative_error(value, sample.outputs.pop(stage.index))
        # Units may share weights, so they are told apart by what they were before.
        parameters = list(dict.fromkeys(each for unit in stage.units for each in unit.parameters))
        before = [None if each.grad is None else each.grad.clone() for each in parameters]
        yield
        grads = [
            each.grad if each.grad is None or old is None else each.grad - old
            for each, old in zip(parameters, before, strict=True)
        ]
        if sample.delayed is None:
            sample.delayed = self._trace(sample, sample.weights.__getitem__, down_to=0)
        now = self._trace(sample, lambda unit: unit.parameters, down_to=stage.index)
        end = [now.get(each) for each in parameters]
        delayed = [sample.delayed.pop(each, None) for each in parameters]
        compared = [*_compare(grads, end), *_compare(grads, delayed), *_compare(delayed, end)]
        if any(each.requires_grad for each in parameters):
            self._found.append((stage.index, n, stage.num_updates, [*compared, error]))
        if stage.index == 0:
            del self._samples[n]

    def forget(self) -> None:
        """Drop what is in flight, as when a state is loaded."""
        self._samples.clear()

    def __str__(self) -> str:
        """A row for each stage, averaged over samples."""
        lines = ["stage  samples  to end-to-end     to delayed        delayed to end   rebuilt"]
        lines.append("                cosine   ratio    cosine   ratio    cosine   ratio    error")
        for j, found in self._by_stage().items():
            means = [mean(getattr(each, name) for each in found) for name in _NAMES]
            numbers = "".join(f"{each:9.4f}" for each in means[:-1])
            lines.append(f"{j:5}  {len(found):7} {numbers}  {means[-1]:.1e}")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw cosines, ratios and errors by stage: means, and the range of all samples."""
        require("matplotlib", "a plot").use("Agg")
        plt = require("matplotlib.pyplot", "a plot")
        found = self._by_stage()
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.5))
        for axis, title, names in (
            (axes[0], "cosine", ("cosine", "cosine_of_delayed", "cosine_to_delayed")),
            (axes[1], "ratio of norms", ("ratio", "ratio_of_delayed", "ratio_to_delayed")),
            (axes[2], "rebuilt output, relative error", ("rebuilt_error",)),
        ):
            for name in names:
                values = [[getattr(each, name) for each in row] for row in found.values()]
                stages = list(found)
                axis.plot(stages, [mean(row) for row in values], "o-", label=_LABELS[name])
                axis.fill_between(
                    stages, [min(v) for v in values], [max(v) for v in values], alpha=0.15
                )
            axis.set(title=title, xlabel="stage", xticks=list(found))
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        axes[2].set_yscale("symlog", linthresh=1e-8)
        axes[2].set_ylim(bottom=0)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)

    def _by_stage(self) -> dict[int, list[Quality]]:
        found: dict[int, list[Quality]] = {}
        for each in sorted(self.found, key=lambda each: each.stage):
            found.setdefault(each.stage, []).append(each)
        return found

    def _trace(
        self, sample: _Sample, weights: Callable[[Unit], Sequence[Tensor]], down_to: int
    ) -> dict[Tensor, Tensor]:
        """The gradients that plain backprop finds, for all stages from the last one down.

        A stream that leaves its grid is for the pipeline to report: there is nothing to compare.
        """
        try:
            return self._trace_all(sample, weights, down_to)
        except ArithmeticError:
            return {}

    def _trace_all(
        self, sample: _Sample, weights: Callable[[Unit], Sequence[Tensor]], down_to: int
    ) -> dict[Tensor, Tensor]:
        message, pulls = sample.message, []
        n, flow, side = message.microbatch, message.flow, message.side
        with message.autocast.again():
            for unit in (unit for stage in self._stages for unit in stage.units):
                flow, pull = unit.trace(n, flow, side, weights(unit))
                pulls.append((unit, pull))
            last = Message(n, flow, message.autocast, side, message.target)
            grads = self._loss.trace(last, self._arithmetic)
        found: dict[Tensor, Tensor] = {}
        num = sum(len(stage.units) for stage in self._stages[down_to:])
        for unit, pull in reversed(pulls[len(pulls) - num :]):
            grads, own = pull(grads)
            for parameter, grad in zip(unit.parameters, own, strict=True):
                if grad is not None:
                    found[parameter] = found[parameter] + grad if parameter in found else grad
        return found


_NAMES = (
    "cosine",
    "ratio",
    "cosine_to_delayed",
    "ratio_to_delayed",
    "cosine_of_delayed",
    "ratio_of_delayed",
    "rebuilt_error",
)
_LABELS = {
    "cosine": "pipeline to end-to-end",
    "cosine_of_delayed": "delayed to end-to-end",
    "cosine_to_delayed": "pipeline to delayed",
    "rebuilt_error": "as rebuilt by the stage above",
}
_LABELS |= {name.replace("cosine", "ratio"): label for name, label in _LABELS.items()}


def _compare(one: Grads, other: Grads) -> tuple[Any, Any]:
    """Cosine and ratio of norms of two gradients, each one vector of all its tensors."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if not pairs:
        return NONE, NONE
    wide = [(a.detach().double(), b.detach().double()) for a, b in pairs]
    dot = sum((a * b).sum() for a, b in wide)
    squares = [sum(each.square().sum() for each in side) for side in zip(*wide, strict=True)]
    norms = [torch.as_tensor(each).sqrt() for each in squares]
    return dot / (norms[0] * norms[1]), norms[0] / norms[1]


def _relative_error(rebuilt: Any, true: Any) -> Any:
    pairs = list(zip(tree_leaves(rebuilt), tree_leaves(true), strict=False))
    if rebuilt is None or not pairs:
        return NONE  # nothing was rebuilt: the unit below has kept what it needs
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return torch.as_tensor(off / size).sqrt()
