"""All that the next ticks of a pipeline depend on, as plain data: taken, verified, put back."""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.stages.module_state import places_of_buffers
from redivider.pipeline.stages.stage import Message, Stage
from redivider.replay.autocast import Autocast

FORMAT = "redivider pipeline 3"


def take_snapshot(pipe: Any) -> dict[str, Any]:
    """Copy everything: weights, optimizers, and all that is in flight."""
    state = {
        "format": FORMAT,
        "pipeline": configuration(pipe),
        "cut": pipe.cut,
        "tick": pipe._tick,
        "first": pipe._first,
        "entered": pipe._entered,
        "microbatches": {
            n: {"side": side, "autocast": autocast.settings}
            for n, (side, autocast) in pipe._in_flight().items()
        },
        "targets": pipe._targets(),
        "stages": {
            stage.index: stage.state_dict_of_training()
            | {
                "up": [each.state_dict() for each in pipe._up[stage.index].values()],
                "down": [each.state_dict() for each in pipe._down[stage.index].values()],
            }
            for stage in pipe.stages
        },
        "units": {name: unit.state_dict() for name, unit in pipe._units.items()},
    }
    if pipe._ends_here:
        state["loss"] = pipe._loss.state_dict()
    return _copied(state)


def verify_snapshot(pipe: Any, state: Any) -> None:
    """Refuse a state that is of another pipeline, or none."""
    if isinstance(state, dict) and "columns" in state:
        num = len(state["columns"])
        raise StateError(f"the state is of {num} replicas; go on with as many")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise StateError(f"this is not a state of a pipeline in the format {FORMAT!r}")
    for key, mine in configuration(pipe).items():
        other = state["pipeline"][key]
        if other != mine:
            raise StateError(f"the state is of another pipeline: its {key} is {other}, not {mine}")
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
    for each in state.get("buffers", {}).keys() - places_of_buffers(module).keys():
        raise StateError(f"{name} is another in the state: it has no buffer {each!r} here")
    mine, other = _looks(module.state_dict()), _looks(state["weights"])
    if mine != other:
        differ = [each for each in (*mine, *other) if mine.get(each) != other.get(each)]
        here, there = (each.get(differ[0], "not there") for each in (mine, other))
        raise StateError(
            f"{name} is another in the state: {differ[0]} is {there} in it, and {here} here"
        )


def _looks(tensors: dict[str, Any]) -> dict[str, str]:
    return {
        key: f"{str(each.dtype).removeprefix('torch.')} of {tuple(each.shape)}"
        for key, each in tensors.items()
        if isinstance(each, Tensor)
    }


def _verify_optimizer(stage: Stage, state: dict[str, Any]) -> None:
    """Refuse the state of another optimizer, as its name and its groups show."""
    if stage.optimizer is None and "groups" not in state:
        return
    mine = "none" if stage.optimizer is None else type(stage.optimizer).__name__
    other = state.get("kind", mine) if "groups" in state else "none"
    if mine != other:
        raise StateError(
            f"the optimizer of stage {stage.index} is {mine}, and in the state {other}"
        )
    names = {id(each): name for name, each in stage.module.named_parameters()}
    here = [[names[id(each)] for each in group["params"]] for group in stage.groups]
    there = [group["names"] for group in state["groups"]]
    if here != there:
        raise StateError(
            f"the optimizer of stage {stage.index} has other groups of parameters than in the "
            f"state: of {[*map(len, here)]} tensors, and there of {[*map(len, there)]}"
        )


def restore_snapshot(pipe: Any, state: dict[str, Any]) -> None:
    """Put everything back; the state stays as it is."""
    state = _copied(state)
    device = pipe.device
    # A state from disk, or from another device, follows the model; optimizers see to their own.
    trainings, state = state["stages"], tree_map_only(Tensor, lambda t: t.to(device), state)
    targets, sides = state["targets"], {n: e["side"] for n, e in state["microbatches"].items()}
    autocasts = {n: Autocast(device, e["autocast"]) for n, e in state["microbatches"].items()}
    for stage in pipe.stages:
        for key, inboxes in (("up", pipe._up), ("down", pipe._down)):
            inbox = inboxes[stage.index] = {}
            for each in state["stages"][stage.index][key]:
                n = each["microbatch"]
                inbox[n] = Message.from_state(each, autocasts[n], sides[n], targets.get(n))
        stage.load_training(trainings[stage.index])
    for name, unit in pipe._units.items():
        unit.load_state_dict(state["units"][name], sides, device)
    if pipe._ends_here:
        pipe._loss.load_state_dict(state["loss"])
    pipe._tick, pipe._first, pipe._entered = state["tick"], state["first"], state["entered"]


def configuration(pipe: Any) -> dict[str, Any]:
    """What must be the same for a state to fit."""
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
    copied: dict[str, Any] = tree_map_only(Tensor, lambda each: each.detach().clone(), state)
    return copied
