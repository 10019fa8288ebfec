"""One stage of a pipeline alone on a device, with simulated neighbours.

The stage and its `run_forward`, `run_backward` and `update` are the library's. Its neighbours'
messages hold random numbers; their layout is that of messages recorded with a small micro-batch.
"""

import gc
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from meter import meter_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import redivider as rd
from redivider.arithmetic import resolve_arithmetic
from redivider.coupling import Streams
from redivider.pipeline.methods import METHODS
from redivider.pipeline.partition import units_of
from redivider.pipeline.runners.tick_context import EagerTick
from redivider.pipeline.schedule import Schedule
from redivider.pipeline.stages.loss import Loss
from redivider.pipeline.stages.message import Flow, Message
from redivider.pipeline.stages.placement import group_units, place_units
from redivider.pipeline.stages.stage import Stage
from redivider.replay.autocast import Autocast

FLOAT = resolve_arithmetic("float")
BOTH = ", both streams"
VARIANTS = (*METHODS, "dsp" + BOTH, "delayed" + BOTH)


class Opaque(nn.Module):
    """A coupling that the pipeline treats as a junction, so that it keeps both streams."""

    def __init__(self, coupling: rd.Coupling) -> None:
        super().__init__()
        self.coupling = coupling

    def forward(self, streams: Streams) -> Streams:
        """Run the coupling."""
        result: Streams = self.coupling(streams)
        return result


@dataclass
class Setting:
    """A model with one unit a stage, on the device, and the size of its micro-batches."""

    model: rd.Chain
    image_size: int
    num_classes: int
    batch: int
    autocast: bool

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def units(self, variant: str) -> dict[str, nn.Module]:
        """Return the units by name."""
        opaque = variant.endswith(BOTH)
        return {
            name: Opaque(unit) if opaque and isinstance(unit, rd.Coupling) else unit
            for name, unit in units_of(self.model).items()
        }

    def images(self, batch: int) -> Message:
        """Return the input message of the first stage."""
        x = torch.randn(batch, 3, self.image_size, self.image_size, device=self.device)
        target = torch.randint(self.num_classes, (batch,), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return Message(0, Flow(x), Autocast(self.device), target=target)

    def like(self, seen: Message, microbatch: int) -> Message:
        """Return a new message of full size, laid out like one that was recorded."""

        def new(tensor: Tensor) -> Tensor:
            shape = (self.batch, *tensor.shape[1:])
            if tensor.is_floating_point():
                return torch.randn(shape, dtype=tensor.dtype, device=tensor.device)
            return torch.randint(self.num_classes, shape, dtype=tensor.dtype, device=tensor.device)

        value, target, grads = tree_map_only(
            Tensor, new, (seen.flow.value, seen.target, seen.grads)
        )
        flow = Flow(value, seen.flow.dtype)
        return Message(microbatch, flow, seen.autocast, target=target, grads=grads)


def build(units: dict[str, nn.Module], variant: str) -> list[Stage]:
    """Return the stages of a pipeline, one for each unit."""
    method = METHODS[variant.removesuffix(BOTH)]
    cut = [1] * len(units)
    every = range(len(cut))
    return group_units(place_units(units, cut, method, FLOAT, 0, every), cut, every)


def meet_loss(message: Message, num_units: int) -> Message:
    """Turn the model's output into a message downwards, as the last stage of a pipeline does."""
    with message.autocast.again():
        return Loss(F.cross_entropy, num_units, seed=0).run(message, FLOAT, EagerTick().guard)[0]


def watch_messages(setting: Setting, variant: str) -> list[tuple[Message, Message]]:
    """Record the messages of each stage from below and from above, with two images."""
    stages = build(setting.units(variant), variant)
    ups = [setting.images(2)]
    for stage in stages:
        ups.append(stage.run_forward(ups[-1]))
    downs = [meet_loss(ups.pop(), len(stages))]
    for stage in reversed(stages[1:]):
        downs.append(stage.run_backward(downs[-1]))
    setting.model.zero_grad()
    return list(zip(ups, reversed(downs), strict=True))


class Alone:
    """A stage with weights of its own, and its simulated neighbours.

    Args:
        setting: The model.
        variant: The method.
        index: Which stage.
        bare: A copy of its unit without memory.
        seen: A message from below and one from above.
    """

    def __init__(
        self,
        setting: Setting,
        variant: str,
        index: int,
        bare: nn.Module,
        seen: tuple[Message, Message],
    ) -> None:
        units = setting.units(variant)
        name, original = list(units.items())[index]
        units[name] = bare.to_empty(device=setting.device)
        units[name].load_state_dict(original.state_dict())
        self.stage = build(units, variant)[index]
        self.stage.optimizer = torch.optim.SGD(
            self.stage.module.parameters(), lr=1e-9, momentum=0.9
        )
        self.delay = Schedule(len(units)).delay(index)
        self._num_units = len(units)
        self._is_last = index == len(units) - 1
        self._setting = setting
        self._below, self._above = seen
        self.up, self.down = 0, 0
        """Bytes of the last message sent upwards, and of the last one downwards."""

    def tick(self, n: int) -> None:
        """Run the forward of micro-batch n, the backward of the one that is due, and update."""
        sent = self.stage.run_forward(self._setting.like(self._below, n))
        if self._is_last:
            self.down = size(self.stage.run_backward(meet_loss(sent, self._num_units)))
        else:
            self.up = size(sent)
            del sent  # owned by the next stage
            if n >= self.delay:
                above = self._setting.like(self._above, n - self.delay)
                self.down = size(self.stage.run_backward(above))
        if self.stage.num_pending:
            self.stage.update(None, ())

    def drop_kept(self) -> None:
        """Free inputs and graphs."""
        for unit in self.stage.units:
            unit.kept.clear()

    def drop_stashed(self) -> None:
        """Free old weights."""
        for unit in self.stage.units:
            if unit.weights.stash:
                unit.weights.stash.copies.clear()

    def drop_optimizer(self) -> None:
        """Free the optimizer's state and gradients."""
        assert self.stage.optimizer is not None
        self.stage.optimizer.zero_grad()
        self.stage.optimizer.state.clear()

    def drop_weights(self) -> None:
        """Free everything else."""
        del self.stage


def size(message: Message) -> int:
    """Return the bytes of all tensors in a message."""
    leaves = tree_leaves((message.flow.value, message.side, message.target, message.grads))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def measure(
    setting: Setting, variant: str, index: int, seen: Sequence[tuple[Message, Message]]
) -> dict[str, Any]:
    """Measure the bytes that a full stage holds between two ticks, and its peak within one."""
    bare = deepcopy(list(setting.units(variant).values())[index]).to("meta")
    with meter_of(setting.device) as meter:
        alone = Alone(setting, variant, index, bare, seen[index])
        del bare
        # `delay` ticks until the first backward, and as many until every micro-batch in flight has
        # its own version of the weights. The last two ticks should not differ.
        for n in range(2 * alone.delay + 3):
            before = meter.bytes
            meter.reset_peak()
            alone.tick(n)
        held = meter.bytes
        row = {"delay": alone.delay, "held": held, "peak": meter.peak, "drift": held - before}
        row |= {"up": alone.up, "down": alone.down}
        # The size of a part is what freeing it returns. "weights" includes all that remains of the
        # stage, such as casts under autocast.
        for part in ("kept", "stashed", "optimizer", "weights"):
            before = meter.bytes
            getattr(alone, f"drop_{part}")()
            gc.collect()
            row[part] = before - meter.bytes
        row["left"] = meter.bytes
    return row
