"""Bytes and cost of every choice for one kind of unit."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from redivider._torch_private import compiled_call
from redivider.backward.offload import NUM_LEAVING
from redivider.backward.saving import Saving
from redivider.budget.meter import size_of
from redivider.budget.trial import Part, Timer, Trial, Usage, is_reversed
from redivider.errors import UnitError
from redivider.replay import Call

ON_GPU = ("offload", "overlap")
ON_HOST = ("offload", "offload-save")
# Choices for junctions, couplings, and blocks of `rd.make_reversible`; `_inside` has more.
JUNCTION = ("store", "checkpoint", "offload")
COUPLING = (*JUNCTION, "reverse", "overlap")
BLOCK = (*JUNCTION, "compress")
OF_BLOCKS = (*BLOCK, "save", "offload-save")


@dataclass(frozen=True)
class Measured:
    """Usage and added cost of every choice, for one kind of unit."""

    usages: dict[str, Usage]
    costs: dict[str, float]
    inner: dict[str, Usage]
    """Usage of a reversed coupling that is not the top of its run."""


def measure_part(part: Part, x: Any, needs: bool, timer: Timer) -> Measured:
    """Measure one kind of unit by all choices that there are for it.

    Args:
        part: A unit of this kind.
        x: Its input.
        needs: Whether its input gets a gradient.
        timer: Timer of all units.
    """
    trial = Trial(part, x, needs, timer)
    usages: dict[str, Usage] = {}
    inner: dict[str, Usage] = {}
    nums: dict[str, int] = {}  # units of which the cost is measured
    choices = choices_of(part, is_cuda=trial.device is not None)
    for choice in [*choices, *_inside(part, trial)]:
        try:
            rebuilds = is_reversed(part, choice, x)
            is_in_row = rebuilds or (part.couples and choice in ON_HOST)
            parts = trial.row if is_in_row else trial.alone
            trial.run(parts, choice)
            trial.run(parts, "store")  # with which its cost is compared
            if rebuilds:
                usages[choice], inner[choice] = _count_reversed(choice, trial)
            elif choice in ON_HOST:
                usages[choice] = _count_on_host(choice, trial)
            else:
                usages[choice] = trial.count(parts, choice)
            nums[choice] = len(parts)
        except UnitError:  # some units can only be stored, as one that writes into its input
            if choice == "store":
                raise
    costs = {
        choice: max(0.0, trial.cost(num, choice) - trial.cost(num, "store")) / num
        for choice, num in nums.items()
    }
    return Measured(usages, costs, inner)


def choices_of(part: Part, *, is_cuda: bool) -> list[str]:
    """Return the names of the choices that there are for a unit, without those for its inside."""
    if part.is_loss:
        return ["store"]
    names = BLOCK if part.begin is not None else COUPLING if part.couples else JUNCTION
    refused = [*(() if is_cuda else ON_GPU), *(("offload",) if part.is_captured else ())]
    return [name for name in names if name not in refused]


def _count_reversed(choice: str, trial: Trial) -> tuple[Usage, Usage]:
    """Return the usage of a reversed coupling at the top of its run, and below the top."""
    row = trial.count(trial.row, choice)
    # One alone has nothing to overlap with.
    alone = trial.count(trial.alone, "reverse" if choice == "overlap" else choice)
    held = (row.held - alone.held) // 2
    # Below the top there are two, and the lower one needs no more than the other.
    below = replace(row, held=held, backward=row.inside - 2 * held)
    return replace(alone, backward=row.backward), below


def _count_on_host(choice: str, trial: Trial) -> Usage:
    """Return the usage of a unit in a chain of others whose tensors wait on the host.

    Alone, its tensors would not leave the device. In a chain, those of a few others are on their
    way to the host, or back.
    """
    usage = trial.count(trial.alone, "checkpoint")
    saved = 0
    if choice == "offload-save":
        inputs_alone, usage = usage.held, trial.count(trial.alone, choice)
        saved = usage.held - inputs_alone
    leaving = size_of(trial.fresh()) + saved
    return replace(
        usage,
        keeps=(),
        held=usage.held - saved,
        forward=usage.forward + saved + NUM_LEAVING * leaving,
        backward=usage.backward + (NUM_LEAVING + 1) * leaving,
    )


def _inside(part: Part, trial: Trial) -> list[str]:
    """Return the choices for what is kept inside of a unit.

    Those of compiled units can only be measured on a GPU: counters see no compiled code. Compiled
    blocks have none, and neither has a loss.
    """
    if part.is_loss:
        return []
    inputs = trial.fresh()
    module, args = part.module, (inputs, *part.args)
    if part.couples:
        module, args = module.f, inputs[:1]
    if part.begin is None and hasattr(compiled_call(module), "run_saving"):
        return [] if trial.device is None else ["save", "trim"]
    call, _ = Call.split(module, args, part.side)
    if any(compiled_call(own) is not None for own in call.modules):
        return []
    saving = Saving(call)
    try:
        with torch.enable_grad():
            saving.record(*args, **part.side)
    except UnitError:
        return []
    if not saving.num_tensors:  # then it would be as "reverse" or "checkpoint"
        return []
    offloads = trial.device is not None and not part.is_captured
    return ["save", *["offload-save"] * offloads]
