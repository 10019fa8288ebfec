"""All that the next ticks of a pipeline depend on, as plain data: taken, verified, put back."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from redivider.pipeline.stage import Message
from redivider.pipeline.state import StateError

FORMAT = "redivider pipeline 2"


def take_snapshot(pipe: Any) -> dict[str, Any]:
    """Copy everything: weights, optimizers, and all that is in flight."""
    state = {
        "format": FORMAT,
        "pipeline": _configuration(pipe),
        "cut": pipe.cut,
        "tick": pipe._tick,
        "first": pipe._first,
        "entered": pipe._entered,
        "up": [[each.state_dict() for each in inbox.values()] for inbox in pipe._up],
        "down": [[each.state_dict() for each in inbox.values()] for inbox in pipe._down],
        "stages": [stage.state_dict_of_training() for stage in pipe.stages],
        "units": {name: unit.state_dict() for name, unit in pipe._units.items()},
        "loss": pipe._loss.state_dict(),
    }
    return _copied(state)


def verify_snapshot(pipe: Any, state: Any) -> None:
    """Refuse a state that is of another pipeline, or none."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise StateError(f"this is not a state of a pipeline in the format {FORMAT!r}")
    for key, mine in _configuration(pipe).items():
        other = state["pipeline"][key]
        if other != mine:
            raise StateError(f"the state is of another pipeline: its {key} is {other}, not {mine}")
    if state["cut"] != pipe.cut:
        raise StateError(
            f"the state has the cut {state['cut']}, this pipeline {pipe.cut}; build it with "
            f"stages={state['cut']}"
        )
    for name, unit in pipe._units.items():
        mine = {key: tuple(each.shape) for key, each in unit.module.state_dict().items()}
        saved = state["units"][name]["weights"]
        other = {key: tuple(each.shape) for key, each in saved.items()}
        if mine != other:
            raise StateError(f"{unit.name} has the tensors {mine}, and in the state {other}")


def restore_snapshot(pipe: Any, state: dict[str, Any]) -> None:
    """Put everything back; the state stays as it is."""
    state = _copied(state)
    device = next(pipe._chain.parameters(), torch.empty(0)).device
    # A state from disk, or from another device, follows the model; optimizers see to their own.
    stages, state = state["stages"], tree_map_only(Tensor, lambda t: t.to(device), state)
    for inboxes, saved in ((pipe._up, state["up"]), (pipe._down, state["down"])):
        for inbox, messages in zip(inboxes, saved, strict=True):
            inbox.clear()
            inbox |= {each["microbatch"]: Message.from_state(each, device) for each in messages}
    sides = {n: m.side for inbox in (*pipe._up, *pipe._down) for n, m in inbox.items()}
    for name, unit in pipe._units.items():
        unit.load_state_dict(state["units"][name], sides, device)
    for stage, training in zip(pipe.stages, stages, strict=True):
        stage.load_training(training)
    pipe._loss.load_state_dict(state["loss"])
    pipe._tick, pipe._first, pipe._entered = state["tick"], state["first"], state["entered"]


def _configuration(pipe: Any) -> dict[str, Any]:
    """What must be the same for a state to fit."""
    return {
        "units": list(pipe._units),
        "method": pipe.method.name,
        "accumulate": pipe.accumulate,
        "latency": pipe.latency,
        "lookahead": pipe.lookahead,
        "seed": pipe.seed,
        "arithmetic": str(pipe.arithmetic),
    }


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = tree_map_only(Tensor, lambda each: each.detach().clone(), state)
    return copied
