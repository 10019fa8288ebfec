"""PETRA's Algorithm 1, seen by one worker: forward, backward, accumulate, update.

A stage works by the weights as they were when the tick began; its update comes last.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from redivider.errors import UnitError, naming
from redivider.pipeline.stages.casts import refresh
from redivider.pipeline.stages.compiled_update import CompiledUpdate
from redivider.pipeline.stages.compression import Packing
from redivider.pipeline.stages.fused_optimizer import unfused_where_new
from redivider.pipeline.stages.layout import dense
from redivider.pipeline.stages.lookahead import Prediction, predict
from redivider.pipeline.stages.unit import Flow, Unit
from redivider.replay.autocast import Autocast


@dataclass
class Message:
    """What a micro-batch carries between stages: its target upwards, gradients downwards."""

    microbatch: int
    flow: Flow
    autocast: Autocast
    side: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    grads: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flow = Flow(dense(self.flow.value), self.flow.dtype)
        self.grads = [each if each is None else dense(each) for each in self.grads]

    def cloned(self, microbatch: int) -> "Message":
        """The same in memory of its own, as of another micro-batch."""
        value, side, target, grads = tree_map_only(
            Tensor, Tensor.clone, (self.flow.value, self.side, self.target, self.grads)
        )
        flow = Flow(value, self.flow.dtype)
        return Message(microbatch, flow, self.autocast, side, target, grads)

    def rounded(self, packing: Packing) -> "Message":
        """What arrives of it at the next stage."""
        if packing.dtype is None:
            return self
        flow = Flow(packing.rounded(self.flow.value), self.flow.dtype)
        return replace(self, flow=flow, grads=packing.rounded(self.grads))

    def state_dict(self) -> dict[str, Any]:
        """As plain data and tensors; what it has of its micro-batch is saved with that."""
        return {
            "microbatch": self.microbatch,
            "value": self.flow.value,
            "dtype": self.flow.dtype,
            "grads": self.grads,
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], autocast: Autocast, side: dict[str, Any], target: Any
    ) -> "Message":
        """Build it again."""
        flow = Flow(state["value"], state["dtype"])
        return cls(state["microbatch"], flow, autocast, side, target, state["grads"])


@dataclass(frozen=True)
class Clip:
    """The largest norm that a gradient may have, over its own stage or over all of them."""

    norm: float
    over: Literal["stage", "all"] = "stage"


@dataclass
class Ahead:
    """What a stage must know to predict its weights."""

    accumulate: int
    factor: Callable[[int], float]
    """Of the learning rate, by the number of an update."""
    given: Sequence[Sequence[Tensor]] | None = None
    """Where the host puts the coefficients of a prediction, in a tick that is recorded."""


class Stage:
    """Consecutive units with their optimizer.

    `module` holds the caller's own units under the names they have in the uncut model, so the names
    of its parameters are the model's. It is a bare module, so that no name is taken.

    Args:
        index: Its place in the pipeline.
        units: The units by their names in the model.
    """

    def __init__(self, index: int, units: dict[str, Unit]) -> None:
        self.index = index
        self.by_name = units
        self.units = list(units.values())
        self.module = nn.Module()
        for name, unit in units.items():
            hang(self.module, name, unit.module)
        self.optimizer: torch.optim.Optimizer | None = None
        self.num_updates = 0
        self.num_pending = 0
        """Backward passes since the last update."""
        parameters: list[Tensor] = [*self.module.parameters()] or [torch.empty(0)]
        kinds = {each.dtype for each in parameters if each.requires_grad} or {torch.float32}
        dtype = reduce(torch.promote_types, kinds)
        self.norm = torch.zeros((), dtype=dtype, device=parameters[0].device)
        """Of the gradient at the last update, before clipping."""
        self.compiled_update: CompiledUpdate | None = None
        self.average: Callable[[nn.Module], None] | None = None
        """Averages gradients, and running statistics, over replicas, where there are some."""
        self.ahead: Ahead | None = None
        """How far a forward looks ahead, if it does."""
        self._predicted: tuple[Any, Prediction | None] = (None, None)

    def forward_weights(self, unit: Unit) -> Sequence[Tensor]:
        """The weights by which a forward would run a unit now."""
        ahead = self._predict()
        found = {} if ahead is None else ahead.weights
        return [found.get(each, each) for each in unit.parameters]

    def run_forward(self, message: Message) -> Message:
        """Forward a new micro-batch; return what goes to the next stage."""
        n, flow = message.microbatch, message.flow
        ahead = self._predict()
        with message.autocast.again():
            for unit in self.units:
                with naming(self._where(unit.name, n)):
                    flow = unit.forward(n, flow, message.side, ahead)
        return Message(n, flow, message.autocast, message.side, message.target)

    def run_backward(self, message: Message) -> Message:
        """Take an old micro-batch back; return what goes to the stage before."""
        n, flow, grads = message.microbatch, message.flow, message.grads
        for unit in reversed(self.units):
            with naming(self._where(unit.name, n)):
                flow, grads = unit.backward(n, flow, grads, message.side)
        self.num_pending += 1
        return Message(n, flow, message.autocast, message.side, grads=grads)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of its optimizer, if it has one."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def divide_rates(self, by: float) -> None:
        """Let its optimizer be as if it had been made with smaller learning rates."""
        for group in self.groups:
            for key in ("lr", "initial_lr"):  # the second one is a scheduler's
                if key in group:
                    group[key] = group[key] / by

    def rates(self, factor: float) -> list[float]:
        """The learning rates of its groups, a multiple of what they were made with."""
        for group in self.groups:
            if "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])  # a tensor changes with the rate itself
        return [group["initial_lr"] * factor for group in self.groups]

    def set_rate(self, factor: float) -> None:
        """Set the learning rates to a multiple of what they were made with."""
        for group, rate in zip(self.groups, self.rates(factor), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def update(self, clip: Clip | None, other_norms: Iterable[Tensor]) -> None:
        """Average the summed gradients, clip them, and step the optimizer.

        Args:
            clip: How gradients are clipped, if at all.
            other_norms: Of the other stages' gradients at their last updates.
        """
        if self.average is not None:
            self.average(self.module)
        trained = [each for group in self.groups for each in group["params"]]
        grads = [each.grad for each in trained if each.grad is not None]
        if self.optimizer is None and any(p.grad is not None for p in self.module.parameters()):
            raise UnitError(
                f"stage {self.index} had nothing to train when the pipeline was made, so it has no "
                "optimizer, and now it has; make the pipeline first, and freeze parameters then"
            )
        if grads and self.num_pending > 1:
            torch._foreach_div_(grads, self.num_pending)
        if clip is not None:
            self._clip(grads, clip, other_norms)
        for unit in self.units:
            if unit.weights.stash:
                unit.weights.stash.advance()
        if self.optimizer is not None:
            self._step(self.optimizer)
            self.module.zero_grad()  # the optimizer may not have all of them
        self.num_pending = 0
        self.num_updates += 1

    def state_dict_of_training(self) -> dict[str, Any]:
        """Counters, and the optimizer's state by the names of the parameters."""
        state: dict[str, Any] = {
            "num_updates": self.num_updates,
            "num_pending": self.num_pending,
            "norm": float(self.norm),
        }
        if self.optimizer is not None:
            names = {id(each): name for name, each in self.module.named_parameters()}
            state["kind"] = type(self.optimizer).__name__
            state["groups"] = [
                {k: v for k, v in group.items() if k != "params"}
                | {"names": [names[id(each)] for each in group["params"]]}
                for group in self.optimizer.param_groups
            ]
            every = self.optimizer.state.items()
            state["optimizer"] = {names[id(p)]: dict(s) for p, s in every if id(p) in names}
            state["beside"] = {key: value for key, value in every if not isinstance(key, Tensor)}
        return state

    def load_training(self, state: dict[str, Any]) -> None:
        """Continue from such a state."""
        self.num_updates = state["num_updates"]
        self.num_pending = state["num_pending"]
        self.norm = torch.full_like(self.norm, state["norm"])
        self.forget_prediction()
        if self.optimizer is None:
            return
        by_name = dict(self.module.named_parameters())
        self.optimizer.state.clear()
        self.optimizer.state.update(state.get("beside", {}))
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "names"})
            on_device = group.get("capturable") or group.get("fused")
            for name in saved["names"]:
                if name in state["optimizer"]:
                    device = by_name[name].device
                    self.optimizer.state[by_name[name]] = {
                        # Most optimizers count their steps on the host.
                        key: value.to(device)
                        if isinstance(value, Tensor) and (key != "step" or on_device)
                        else value
                        for key, value in state["optimizer"][name].items()
                    }

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        casts = [each for unit in self.units for each in unit.weights.casts.values()]
        copies = {each: copy for some in casts for each, copy in some.copies.items()}
        if len(copies) < sum(len(each.copies) for each in casts):
            copies = {}  # some weights have two
        done = self.compiled_update is not None and self.compiled_update.step(optimizer, copies)
        if not done:
            with unfused_where_new(optimizer):
                optimizer.step()
        if done and copies:  # the update has cast them itself
            for each in casts:
                each.note_fresh()
        else:
            refresh(casts)

    @property
    def num_ahead(self) -> int:
        """Updates until what is forwarded now comes back; 0 if forwards do not look ahead."""
        if self.ahead is None or self.optimizer is None:
            return 0
        # All that is in flight here comes back before it.
        return (self.num_pending + len(self.units[0].kept)) // self.ahead.accumulate

    def factors(self, num: int) -> list[float]:
        """Of the learning rate, for as many updates from now on."""
        assert self.ahead is not None
        first = self.num_updates
        return [self.ahead.factor(update) for update in range(first, first + num)]

    def forget_prediction(self) -> None:
        """Predict anew, though nothing that is counted has changed."""
        self._predicted = (None, None)

    def _predict(self) -> Prediction | None:
        """The weights of the time when what is forwarded now comes back, where they are others."""
        if self.ahead is None or self.optimizer is None:
            return None
        num = self.num_ahead
        made, found = self._predicted
        # Somebody may have changed weights, or frozen some, between two updates.
        trained = [each for group in self.groups for each in group["params"]]
        now = self.num_updates, num, [(each._version, each.requires_grad) for each in trained]
        if found is None or made != now:
            found = None
            self.forget_prediction()  # its memory is free before another is taken
            found = Prediction(0, {})
            if num:
                found = predict(self.optimizer, self.factors(num), self.ahead.given)
            self._predicted = (now, found)
        return found

    def _clip(self, grads: Sequence[Tensor], clip: Clip, other_norms: Iterable[Tensor]) -> None:
        if not grads:
            self.norm = torch.zeros_like(self.norm)
            return
        total = self.norm = torch.nn.utils.get_total_norm(grads)
        if clip.over == "all":
            total = torch.stack([total, *(each.to(total) for each in other_norms)]).norm()
        # Always multiplied, by 1 mostly: nobody waits for the norm.
        torch._foreach_mul_(list(grads), (clip.norm / total).clamp(max=1))

    def _where(self, unit: str, microbatch: int) -> str:
        return f"stage {self.index}, {unit}, micro-batch {microbatch}"


def hang(root: nn.Module, name: str, module: nn.Module) -> None:
    """Make a module reachable under a dotted name."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root.add_module(last, module)
