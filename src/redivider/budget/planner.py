"""Planner: measures the units of a network, solves for their choices, and checks a real step."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redivider.budget.blocks import measure_blocks
from redivider.budget.measure import differentiate, measure
from redivider.budget.meter import counting, gpu_of
from redivider.budget.plan import (
    Plan,
    PlannedUnit,
    backward_of,
    set_backward,
    unit_names,
    unwrapped,
    verify_kind,
    wrappers,
)
from redivider.budget.problem import Problem, find_least, trace
from redivider.budget.solve import solve
from redivider.budget.trial import wanted_of
from redivider.chain import Chain, verify_keywords
from redivider.checks.memory import format_bytes
from redivider.checks.restore import restored
from redivider.checks.size import parse_bytes
from redivider.convert.reversible import strategies_of
from redivider.tree import as_leaf, map_tensors, tensors_of

MARGIN = 0.03  # of the memory of a GPU, for its allocator


def plan(
    model: nn.Module,
    x: Any = None,
    /,
    *,
    memory: int | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    capture: bool = False,
    **side: Any,
) -> Plan:
    """Choose for every unit what it keeps, so that a step is fastest within a number of bytes.

        plan = rd.plan(model, x, memory="6GiB", loss=lambda y: F.cross_entropy(y, targets))
        print(plan)
        plan.apply()

    Every kind of unit is measured once, and the plan is checked on one real step. The model stays
    as it is until `plan.apply()`. Call this under the autocast of the training, and before DDP or
    FSDP wraps the model.

    Args:
        model: A chain, or a network of `rd.make_reversible`, whose blocks are the units. It is in
            training mode, on the device where it trains, compiled or not.
        x: Its input; a network that takes keywords alone has none.
        memory: Bytes, also as "6GiB" or "500 MB", that forward and backward may add to the weights,
            their gradients and the state of the optimizer. By default what is free.
        loss: A function from the output to a loss; by default the loss that is part of the output,
            as that of transformers, else the sum of the output. Its memory counts as well. What the
            caller keeps of the output comes on top.
        capture: Whether steps will be captured (`rd.capture`). Then "offload" is no choice, and on
            a GPU the time of the host does not count.
        **side: Keywords of the model.

    Raises:
        ValueError: If no plan fits; it says how much is needed, and by which unit.
    """
    _verify(model, x, side)
    x, side = map_tensors(as_leaf, (x, side))
    device = gpu_of((x, side))
    budget = _free(model, device) if memory is None else parse_bytes(memory)
    margin = 0.0 if device is None else MARGIN
    loss = _default_loss if loss is None else loss
    if not callable(loss):
        raise TypeError(
            "loss takes the output of the model, such as loss=lambda y: F.cross_entropy(y, "
            f"targets), got {type(loss).__name__}"
        )
    if isinstance(model, Chain):
        names = unit_names(model)
        problem = measure(model, x, side, loss, is_captured=capture)
    else:
        names, problem = measure_blocks(model, x, side, loss, is_captured=capture)
        names.append("the head and the loss")
    spare = int(margin * budget)
    limit, note = budget - spare, ""
    # The second plan is for less than the first one, and the third takes as little as possible.
    for _ in range(3):
        choices = cheapest(problem, limit) or smallest(problem)
        units = list(_planned(problem, choices, names))
        measured = measure_step(model, backward_of(model, units), x, loss, **side)
        if measured <= budget - spare // 3:  # steps differ by less than that
            cost_unit = "FLOPs" if device is None else "seconds"
            return Plan(units, budget, measured, cost_unit, note, model)
        predicted = max(unit.peak for unit in units)
        if choices == smallest(problem):
            break
        limit = 0 if note else budget - spare - (measured - predicted)
        too_much = format_bytes(measured - (budget - spare // 3))
        note = f"made again, as a first plan took {too_much} too much"
    largest = next(unit.name for unit in units if unit.peak == predicted)
    raise ValueError(
        f"no plan fits into {budget:,} bytes: the smallest budget is "
        f"{measured + int(margin * measured):,} bytes, which {largest} needs; use a smaller batch"
    )


def cheapest(problem: Problem, memory: int) -> list[int] | None:
    """Return the index of the cheapest option of every unit, or None if nothing fits.

    Gradients are exact if that takes no longer.
    """
    choices, exact = solve(problem, memory), problem.without("compress")
    if choices is None or exact.units == problem.units:
        return choices
    others = solve(exact, memory)
    if others is None or cost_of(exact, others) > cost_of(problem, choices):
        return choices
    pairs = zip(problem.units, exact.units, others, strict=True)
    return [own.index(options[choice]) for own, options, choice in pairs]


def smallest(problem: Problem) -> list[int]:
    """Return the index of the option of every unit, in a plan for the smallest budget."""
    # By bytes, which are the same in every measurement, while times differ.
    choices = solve(problem.by_bytes(), find_least(problem))
    assert choices is not None
    return choices


def cost_of(problem: Problem, choices: Sequence[int]) -> float:
    """Return the work or time that choices add to that of `store`."""
    return sum(own[choice].cost for own, choice in zip(problem.units, choices, strict=True))


def measure_step(
    model: nn.Module,
    backward: str | Sequence[str] | Mapping[str, str],
    x: Any,
    loss: Callable[[Any], Any],
    **side: Any,
) -> int:
    """Return the peak of a forward and backward, without the gradients of weights, in bytes.

    Args:
        model: The chain or network, which stays as it is.
        backward: Strategy to run it by, or one for every unit of a chain, or by name of a block.
        x: Its input; None if it takes keywords alone.
        loss: A function from its output to a loss.
        **side: Its keywords.
    """
    inputs = (x,) if isinstance(model, Chain) or x is not None else ()
    module = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    torch.clear_autocast_cache()
    with (
        _training_by(model, backward),
        restored(module, checks_drift=True),  # a step that does takes most
        torch.enable_grad(),
        counting(gpu_of((x, side)), weights) as meter,
    ):
        wanted = [*weights, *wanted_of((x, side))]
        grads = differentiate(loss(model(*inputs, **side)), wanted)
        return meter.peak_without(grads[: len(weights)])


@contextmanager
def _training_by(model: Any, backward: Any) -> Iterator[None]:
    """Let a chain or a network train by some strategies, inside."""
    before = model.backward if isinstance(model, Chain) else strategies_of(model)
    try:
        set_backward(model, backward)
        yield
    finally:
        set_backward(model, before)


def _planned(
    problem: Problem, choices: Sequence[int], names: Sequence[str]
) -> Iterator[PlannedUnit]:
    before = 0
    options = [own[choice] for own, choice in zip(problem.units, choices, strict=True)]
    for name, option, (held, peak) in zip(names, options, trace(problem, choices), strict=True):
        yield PlannedUnit(name, option.choice, held - before, option.cost, peak)
        before = held


def _verify(model: Any, x: Any, side: dict[str, Any]) -> None:
    """Refuse a model that cannot be planned, and inputs that it does not take."""
    kinds = wrappers(sharded=True)
    if isinstance(model, nn.Module) and any(isinstance(own, kinds) for own in model.modules()):
        raise ValueError(
            "plan the model before DDP or FSDP wraps it: plan = rd.plan(model, x); then "
            "plan.apply() works before and after"
        )
    if unwrapped(model) is not model:
        raise ValueError("plan the model itself, not torch.compile(model); model.compile() works")
    verify_kind(model, "plan")
    if isinstance(model, Chain):
        if x is None:
            raise TypeError("the input of a chain has no name: rd.plan(model, x, memory=...)")
        verify_keywords(side, model.takes)
    tensors = [*tensors_of((x, side)), *model.parameters()]
    if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors):
        raise ValueError("a plan needs gradients, which tensors of torch.inference_mode() lack")


def _default_loss(y: Any) -> list[Tensor]:
    """Return the loss that is part of an output, or the sums of its tensors."""
    loss = getattr(y, "loss", None)
    return [loss] if isinstance(loss, Tensor) else [tensor.sum() for tensor in tensors_of(y)]


def _free(model: nn.Module, device: torch.device | None) -> int:
    """Return the bytes that are free, without those that gradients will take."""
    grads = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    return _free_bytes(device) - grads


def _free_bytes(device: torch.device | None) -> int:
    """Return the bytes that are free on a GPU, or on the host."""
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if match is None:
        raise ValueError('on this system, say how much memory there is: memory="8GiB"')
    return int(match[1]) * 1024
