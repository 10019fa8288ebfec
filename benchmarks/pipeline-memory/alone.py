"""One stage of a pipeline alone on a device, between neighbours that are only played.

The stage is the library's, and so is all that it does: `run_forward`, `run_backward`, `update`.
What its neighbours would send is made up: random numbers, in messages like those in which a small
micro-batch was seen to travel.
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
    """A coupling that its pipeline takes for a junction, and so keeps both streams of."""

    def __init__(self, coupling: rd.Coupling) -> None:
        super().__init__()
        self.coupling = coupling

    def forward(self, streams: Streams) -> Streams:
        """Do what the coupling does."""
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
        """Where all of it is."""
        return next(self.model.parameters()).device

    def units(self, variant: str) -> dict[str, nn.Module]:
        """The units by their names."""
        opaque = variant.endswith(BOTH)
        return {
            name: Opaque(unit) if opaque and isinstance(unit, rd.Coupling) else unit
            for name, unit in units_of(self.model).items()
        }

    def images(self, batch: int) -> Message:
        """What the first stage is given."""
        x = torch.randn(batch, 3, self.image_size, self.image_size, device=self.device)
        target = torch.randint(self.num_classes, (batch,), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return Message(0, Flow(x), Autocast(self.device), target=target)

    def like(self, seen: Message, microbatch: int) -> Message:
        """A message like one that was seen, of full size, new, and in memory of its own."""

        def new(each: Tensor) -> Tensor:
            shape = (self.batch, *each.shape[1:])
            if each.is_floating_point():
                return torch.randn(shape, dtype=each.dtype, device=each.device)
            return torch.randint(self.num_classes, shape, dtype=each.dtype, device=each.device)

        value, target, grads = tree_map_only(
            Tensor, new, (seen.flow.value, seen.target, seen.grads)
        )
        flow = Flow(value, seen.flow.dtype)
        return Message(microbatch, flow, seen.autocast, target=target, grads=grads)


def build(units: dict[str, nn.Module], variant: str) -> list[Stage]:
    """The stages of a pipeline, one for each unit."""
    method = METHODS[variant.removesuffix(BOTH)]
    cut = [1] * len(units)
    every = range(len(cut))
    return group_units(place_units(units, cut, method, FLOAT, 0, every), cut, every)


def meet_loss(message: Message, num_units: int) -> Message:
    """Turn the model's output into a message downwards, as the last stage of a pipeline does."""
    with message.autocast.again():
        return Loss(F.cross_entropy, num_units, seed=0).run(message, FLOAT, EagerTick().guard)[0]


def watch_messages(setting: Setting, variant: str) -> list[tuple[Message, Message]]:
    """What each stage is given from below and from above, of a micro-batch of two images."""
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
    """A stage with weights of its own, and the neighbours that it does not have.

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
        """Forward micro-batch n, take back the one that is due, and update."""
        sent = self.stage.run_forward(self._setting.like(self._below, n))
        if self._is_last:
            self.down = size(self.stage.run_backward(meet_loss(sent, self._num_units)))
        else:
            self.up = size(sent)
            del sent  # it is the next stage's now
            if n >= self.delay:
                above = self._setting.like(self._above, n - self.delay)
                self.down = size(self.stage.run_backward(above))
        if self.stage.num_pending:
            self.stage.update(None, ())

    def drop_kept(self) -> None:
        """Let inputs and graphs go."""
        for unit in self.stage.units:
            unit.kept.clear()

    def drop_stashed(self) -> None:
        """Let old weights go."""
        for unit in self.stage.units:
            if unit.weights.stash:
                unit.weights.stash.copies.clear()

    def drop_optimizer(self) -> None:
        """Let the optimizer's state and gradients go."""
        assert self.stage.optimizer is not None
        self.stage.optimizer.zero_grad()
        self.stage.optimizer.state.clear()

    def drop_weights(self) -> None:
        """Let everything go."""
        del self.stage


def size(message: Message) -> int:
    """Bytes that a message has to carry."""
    leaves = tree_leaves((message.flow.value, message.side, message.target, message.grads))
    return sum(each.nbytes for each in leaves if isinstance(each, Tensor))


def measure(
    setting: Setting, variant: str, index: int, seen: Sequence[tuple[Message, Message]]
) -> dict[str, Any]:
    """Bytes that a stage holds between two ticks when it is full, and at most during one."""
    bare = deepcopy(list(setting.units(variant).values())[index]).to("meta")
    with meter_of(setting.device) as meter:
        alone = Alone(setting, variant, index, bare, seen[index])
        del bare
        # So many ticks to the first backward, and as many until every micro-batch in flight has
        # its own version of the weights. The last two should not differ.
        for n in range(2 * alone.delay + 3):
            before = meter.bytes
            meter.reset_peak()
            alone.tick(n)
        held = meter.bytes
        row = {"delay": alone.delay, "held": held, "peak": meter.peak, "drift": held - before}
        row |= {"up": alone.up, "down": alone.down}
        # What each part takes is what comes back when it is let go; with the weights, all the rest
        # that a stage has of its own (under autocast, casts of them).
        for part in ("kept", "stashed", "optimizer", "weights"):
            before = meter.bytes
            getattr(alone, f"drop_{part}")()
            gc.collect()
            row[part] = before - meter.bytes
        row["left"] = meter.bytes
    return row
