"""Snapshot of everything that the next ticks of a pipeline depend on: take, verify, restore."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.stages.lookahead import LOOKAHEADS
from redivider.pipeline.stages.message import Message
from redivider.pipeline.stages.module_state import places_of_buffers
from redivider.pipeline.stages.stage import Stage
from redivider.replay.autocast import Autocast
from redivider.tree import map_tensors

if TYPE_CHECKING:
    from redivider.pipeline.pipeline import Pipeline

FORMAT = "redivider pipeline 3"


def take_snapshot(pipe: "Pipeline") -> dict[str, Any]:
    """Copy weights, optimizer states, and everything in flight."""
    flight = pipe.in_flight
    state = {
        "format": FORMAT,
        "pipeline": configuration(pipe),
        "cut": pipe.cut,
        "tick": flight.tick,
        "first": flight.first,
        "entered": flight.entered,
        "microbatches": {
            n: {"side": side, "autocast": autocast.settings}
            for n, (side, autocast) in pipe.transport.contexts().items()
        },
        "targets": pipe.transport.targets(),
        "stages": {
            stage.index: stage.state_dict_of_training()
            | {
                "up": [message.state_dict() for message in flight.up[stage.index].values()],
                "down": [message.state_dict() for message in flight.down[stage.index].values()],
            }
            for stage in pipe.stages
        },
        "units": {name: unit.state_dict() for name, unit in pipe._units.items()},
    }
    if pipe._ends_here:
        state["loss"] = pipe._loss.state_dict()
    return _copied(state)


def verify_snapshot(pipe: "Pipeline", state: Any) -> None:
    """Raise `StateError` if this is not a state, or that of another pipeline."""
    if isinstance(state, dict) and "columns" in state:
        num = len(state["columns"])
        raise StateError(f"the state is of {num} replicas; resume with as many")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise StateError(f"this is not a state of a pipeline in the format {FORMAT!r}")
    for key, mine in configuration(pipe).items():
        other = state["pipeline"][key]
        if key == "lookahead":
            other = LOOKAHEADS.get(other, other)  # an older state may have its former name
        if other != mine:
            raise StateError(
                f"the state is of a pipeline with {key} {other}, and this one has {mine}"
            )
    if state["cut"] != pipe.cut:
        raise StateError(
            f"the state has the cut {state['cut']}, this pipeline {pipe.cut}; build it with "
            f"stages={state['cut']}"
        )
    for stage in pipe.stages:
        if stage.index in state["stages"]:
            _verify_optimizer(stage, state["stages"][stage.index])
    for name, unit in pipe._units.items():
        if name not in state["units"]:
            raise StateError(f"{unit.name} is not in the state: it is that of another process")
        _verify_weights(unit.name, unit.module, state["units"][name])
    if pipe._ends_here:
        _verify_weights("the loss", pipe._loss.module, state["loss"])


def _verify_weights(name: str, module: nn.Module, state: dict[str, Any]) -> None:
    for buffer in state.get("buffers", {}).keys() - places_of_buffers(module).keys():
        raise StateError(f"{name} differs from the state: it has no buffer {buffer!r} here")
    mine, other = _descriptions(module.state_dict()), _descriptions(state["weights"])
    if mine != other:
        key = next(key for key in (*mine, *other) if mine.get(key) != other.get(key))
        here, there = mine.get(key, "not there"), other.get(key, "not there")
        raise StateError(
            f"{name} differs from the state: {key} is {there} in the state, and {here} here"
        )


def _descriptions(tensors: dict[str, Any]) -> dict[str, str]:
    """Return the dtype and shape of every tensor, in words."""
    return {
        key: f"{str(value.dtype).removeprefix('torch.')} of {tuple(value.shape)}"
        for key, value in tensors.items()
        if isinstance(value, Tensor)
    }


def _verify_optimizer(stage: Stage, state: dict[str, Any]) -> None:
    """Raise `StateError` if the optimizer has another class or other groups than in the state."""
    if stage.optimizer is None and "groups" not in state:
        return
    mine = "none" if stage.optimizer is None else type(stage.optimizer).__name__
    other = state.get("kind", mine) if "groups" in state else "none"
    if mine != other:
        raise StateError(
            f"the optimizer of stage {stage.index} is {mine}, and in the state {other}"
        )
    names = {id(param): name for name, param in stage.module.named_parameters()}
    here = [[names[id(param)] for param in group["params"]] for group in stage.groups]
    there = [group["names"] for group in state["groups"]]
    if here != there:
        raise StateError(
            f"the optimizer of stage {stage.index} has other groups of parameters than in the "
            f"state: of {[*map(len, here)]} tensors, and there of {[*map(len, there)]}"
        )


def restore_snapshot(pipe: "Pipeline", state: dict[str, Any]) -> None:
    """Restore everything from a state, which stays as it is."""
    state = _copied(state)
    device = pipe.device
    # A state from disk or from another device moves to the model's. That of optimizers does not:
    # stages move it, because some of its tensors stay on the host.
    trainings, state = state["stages"], map_tensors(lambda t: t.to(device), state)
    targets, sides = state["targets"], {n: e["side"] for n, e in state["microbatches"].items()}
    autocasts = {n: Autocast(device, e["autocast"]) for n, e in state["microbatches"].items()}
    flight = pipe.in_flight
    for stage in pipe.stages:
        for key, inboxes in (("up", flight.up), ("down", flight.down)):
            inbox = inboxes[stage.index] = {}
            for entry in state["stages"][stage.index][key]:
                n = entry["microbatch"]
                inbox[n] = Message.from_state(entry, autocasts[n], sides[n], targets.get(n))
        stage.load_training(trainings[stage.index])
    for name, unit in pipe._units.items():
        unit.load_state_dict(state["units"][name], sides, device)
    if pipe._ends_here:
        pipe._loss.load_state_dict(state["loss"])
    flight.tick, flight.first, flight.entered = state["tick"], state["first"], state["entered"]


def configuration(pipe: "Pipeline") -> dict[str, Any]:
    """Return the settings that a pipeline and its state must have in common."""
    return {
        "units": pipe._unit_names,
        "method": pipe.method.name,
        "accumulate": pipe.accumulate,
        "latency": pipe.latency,
        "lookahead": pipe.lookahead,
        "seed": pipe.seed,
        "arithmetic": str(pipe.arithmetic),
        "message_dtype": str(pipe.packing.dtype),
        "replicas": pipe.num_replicas,
    }


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = map_tensors(lambda tensor: tensor.detach().clone(), state)
    return copied
