"""Stage of a pipeline: PETRA's Algorithm 1 for one worker.

In a tick it runs the forward of a new micro-batch and the backward of an old one, both by the
weights that it had when the tick began. After `accumulate` backward passes an update ends the tick.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from redivider.errors import UnitError, naming
from redivider.pipeline.stages.casts import refresh
from redivider.pipeline.stages.fused_optimizer import unfused_where_new
from redivider.pipeline.stages.lookahead import Ahead, Prediction
from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.unit import Unit

if TYPE_CHECKING:
    from redivider.pipeline.stages.compiled_update import CompiledUpdate


# Options that choose an optimizer's kernels: loading a state leaves them as they are here.
KERNELS = ("fused", "foreach", "capturable")


@dataclass(frozen=True)
class Clip:
    """Largest norm of the gradient of a stage, or of all stages together."""

    norm: float
    over: Literal["stage", "all"] = "stage"


class Stage:
    """Consecutive units with their optimizer.

    `module` holds the caller's own units under their names in the uncut model, so that its
    parameters have the model's names. It is a bare `nn.Module`: no attribute hides a unit's name.

    Args:
        index: Index in the pipeline.
        units: Units, by their names in the model.
    """

    def __init__(self, index: int, units: dict[str, Unit]) -> None:
        self.index = index
        self.by_name = units
        self.units = list(units.values())
        self.module = nn.Module()
        for name, unit in units.items():
            _add_submodule(self.module, name, unit.module)
        self.optimizer: torch.optim.Optimizer | None = None
        self.num_updates = 0
        self.num_pending = 0
        """Backward passes since the last update."""
        parameters: list[Tensor] = [*self.module.parameters()] or [torch.empty(0)]
        dtypes = {param.dtype for param in parameters if param.requires_grad} or {torch.float32}
        dtype = reduce(torch.promote_types, dtypes)
        self.norm = torch.zeros((), dtype=dtype, device=parameters[0].device)
        """Norm of the gradient at the last update, before clipping."""
        self.compiled_update: CompiledUpdate | None = None
        self.ahead: Ahead | None = None
        """Predictor of the weights; None without look-ahead."""
        self.accumulate = 1
        """Backward passes per update."""
        self._postponed: list[Callable[[], None]] = []
        self._predicted: tuple[Any, Prediction | None] = (None, None)

    def forward_weights(self, unit: Unit) -> Sequence[Tensor]:
        """Return the weights that the next forward of a unit uses."""
        ahead = self._predict()
        predicted = {} if ahead is None else ahead.weights
        return [predicted.get(param, param) for param in unit.parameters]

    def run_forward(self, message: Message) -> Message:
        """Run the forward of a new micro-batch; return the message to the next stage.

        If a unit raises, none of them keeps the micro-batch.
        """
        n, flow = message.microbatch, message.flow
        ahead = self._predict()
        try:
            with message.autocast.again():
                for unit in self.units:
                    with naming(self._where(unit.name, n)):
                        flow = unit.forward(n, flow, message.side, ahead)
        except BaseException:
            for unit in self.units:
                unit.drop(n)
            raise
        return Message(n, flow, message.autocast, message.side, message.target)

    def run_backward(self, message: Message, *, is_urgent: bool = False) -> Message:
        """Run the backward of an old micro-batch; return the message to the previous stage.

        Args:
            message: Message from the next stage.
            is_urgent: Whether to leave gradients of weights to `finish_backward`.
        """
        n, flow, grads = message.microbatch, message.flow, message.grads
        postponed = self._postponed if is_urgent else None
        for unit in reversed(self.units):
            with naming(self._where(unit.name, n)):
                flow, grads = unit.backward(n, flow, grads, message.side, postponed)
        self.num_pending += 1
        return Message(n, flow, message.autocast, message.side, grads=grads)

    @property
    def is_unfinished(self) -> bool:
        """Whether gradients of weights are left to compute."""
        return bool(self._postponed)

    def finish_backward(self) -> None:
        """Compute the gradients of weights that a backward has left."""
        postponed, self._postponed = self._postponed, []
        for finish in postponed:
            finish()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer; none without an optimizer."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def divide_rates(self, by: float) -> None:
        """Divide the initial learning rates, as if the optimizer had been built with them."""
        for group in self.groups:
            for key in ("lr", "initial_lr"):  # "initial_lr" is set by a scheduler of torch
                if key in group:
                    group[key] = group[key] / by

    def rates(self, factor: float) -> list[float]:
        """Return the learning rates of the groups: their initial ones, times a factor."""
        for group in self.groups:
            if "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])  # a tensor would change with "lr"
        return [group["initial_lr"] * factor for group in self.groups]

    def set_rate(self, factor: float) -> None:
        """Set the learning rates to the initial ones, times a factor."""
        for group, rate in zip(self.groups, self.rates(factor), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def update(self, clip: Clip | None, other_norms: Iterable[Tensor]) -> None:
        """Average the summed gradients, clip them, and step the optimizer.

        Args:
            clip: Largest norm of the gradient; None for no clipping.
            other_norms: Norms of the other stages' gradients at their last updates.
        """
        trained = [param for group in self.groups for param in group["params"]]
        grads = [param.grad for param in trained if param.grad is not None]
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
                unit.weights.stash.advance()  # before the step overwrites the weights
        if self.optimizer is not None:
            self._step(self.optimizer)
            # The module's, not the optimizer's, which may not have all parameters.
            self.module.zero_grad()
        self.num_pending = 0
        self.num_updates += 1

    def state_dict_of_training(self) -> dict[str, Any]:
        """Return the counters, and the optimizer's state by the names of the parameters."""
        state: dict[str, Any] = {
            "num_updates": self.num_updates,
            "num_pending": self.num_pending,
            "norm": float(self.norm),
        }
        if self.optimizer is not None:
            names = {id(param): name for name, param in self.module.named_parameters()}
            state["kind"] = type(self.optimizer).__name__
            state["groups"] = [
                {k: v for k, v in group.items() if k != "params"}
                | {"names": [names[id(param)] for param in group["params"]]}
                for group in self.optimizer.param_groups
            ]
            items = self.optimizer.state.items()
            state["optimizer"] = {names[id(p)]: dict(s) for p, s in items if id(p) in names}
            ahead = {} if self.ahead is None else self.ahead.state_dict(names)
            if ahead:
                state["ahead"] = ahead
            # Some optimizers also keep state that belongs to no parameter.
            state["beside"] = {key: value for key, value in items if not isinstance(key, Tensor)}
        return state

    def load_training(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict_of_training` returned."""
        self.num_updates = state["num_updates"]
        self.num_pending = state["num_pending"]
        self.norm = torch.full_like(self.norm, state["norm"])
        self.forget_prediction()
        if self.optimizer is None:
            return
        by_name = dict(self.module.named_parameters())
        if self.ahead is not None:
            self.ahead.load_state_dict(state.get("ahead", {}), by_name)
        self.optimizer.state.clear()
        self.optimizer.state.update(state.get("beside", {}))
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("names", *KERNELS)})
            on_device = group.get("capturable") or group.get("fused")
            for name in saved["names"]:
                if name in state["optimizer"]:
                    device = by_name[name].device
                    # Most optimizers count their steps on the host.
                    homes = {"step": device if on_device else torch.device("cpu")}
                    self.optimizer.state[by_name[name]] = {
                        key: value.to(homes.get(key, device))
                        if isinstance(value, Tensor)
                        else value
                        for key, value in state["optimizer"][name].items()
                    }

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, and cast the new weights for autocast."""
        casts = [cast for unit in self.units for cast in unit.weights.casts.values()]
        copies = {weight: copy for cast in casts for weight, copy in cast.copies.items()}
        changes = self.ahead is not None and self.ahead.changes_updates
        if changes or len(copies) < sum(len(cast.copies) for cast in casts):
            copies = {}  # a weight with two copies; a compiled update casts to one only
        compiled = self.compiled_update
        with nullcontext() if self.ahead is None else self.ahead.watching(optimizer):
            is_done = compiled is not None and compiled.step(optimizer, copies)
            if not is_done:
                with unfused_where_new(optimizer):
                    optimizer.step()
        if is_done and copies:  # the compiled update has cast the weights, too
            for cast in casts:
                cast.mark_fresh()
        else:
            refresh(casts)

    @property
    def num_ahead(self) -> int:
        """Updates between the next forward and its backward; 0 without look-ahead."""
        if self.ahead is None or self.optimizer is None:
            return 0
        # The backward of every micro-batch that is in flight in this stage comes first.
        return (self.num_pending + len(self.units[0].kept)) // self.accumulate

    def forget_prediction(self) -> None:
        """Drop the cached prediction, for changes that its key does not show."""
        self._predicted = (None, None)

    def _predict(self) -> Prediction | None:
        """Return the weights predicted for the backward of the next forward, cached by a key."""
        if self.ahead is None or self.optimizer is None:
            return None
        num = self.num_ahead
        # The caller may have changed weights, or frozen some, between two updates.
        trained = [param for group in self.groups for param in group["params"]]
        key = self.num_updates, num, [(param._version, param.requires_grad) for param in trained]
        if self._predicted[0] != key:
            self.forget_prediction()  # free its memory before the new one is allocated
            self._predicted = key, self.ahead.predict(num) if num else Prediction(0, {})
        return self._predicted[1]

    def _clip(self, grads: Sequence[Tensor], clip: Clip, other_norms: Iterable[Tensor]) -> None:
        if not grads:
            self.norm = torch.zeros_like(self.norm)
            return
        total = self.norm = torch.nn.utils.get_total_norm(grads)
        if clip.over == "all":
            total = torch.stack([total, *(norm.to(total) for norm in other_norms)]).norm()
        # Always multiply, mostly by 1: a branch on the norm would wait for the device.
        torch._foreach_mul_(list(grads), (clip.norm / total).clamp(max=1))

    def _where(self, unit: str, microbatch: int) -> str:
        return f"stage {self.index}, {unit}, micro-batch {microbatch}"


def _add_submodule(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under a dotted name, with empty modules on the path to it."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
