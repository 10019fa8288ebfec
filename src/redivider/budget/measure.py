"""Choices for all units of a chain, as a problem; every kind of unit is measured once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redivider.arithmetic import Arithmetic
from redivider.backward.row import prepare_streams
from redivider.budget.kind import describe, kind_of_module
from redivider.budget.meter import address_of, size_of
from redivider.budget.problem import Key, Option, Peak, Problem
from redivider.budget.trial import Part, Timer, wanted_of
from redivider.budget.unit import Measured, measure_part
from redivider.chain import Chain, name_unit, taken
from redivider.checks.restore import restored
from redivider.errors import naming
from redivider.tree import tensors_of


def measure(
    chain: Chain,
    x: Any,
    side: dict[str, Any],
    loss: Callable[[Any], Any],
    *,
    is_captured: bool = False,
) -> Problem:
    """Measure all units of a chain, and the loss above them.

    Args:
        chain: The chain.
        x: Its input.
        side: Its keywords.
        loss: A function from its output to tensors.
        is_captured: Whether the step is captured.
    """
    arithmetic = chain.arithmetic
    checks_drift = chain.training and chain.check_every > 0
    parts = [
        Part(
            unit,
            taken(unit, side),
            arithmetic,
            is_captured=is_captured,
            checks_drift=checks_drift,
        )
        for unit in chain
    ]
    parts = [replace(parts[0], is_first=True), *parts[1:], Part(loss, {}, arithmetic, is_loss=True)]
    keys: dict[int, Key] = {address_of(tensor): ("x", i) for i, tensor in enumerate(tensors_of(x))}
    sizes: dict[Key, int] = dict.fromkeys(keys.values(), 0)  # the caller's
    needs = bool(wanted_of(x))
    known: dict[Any, Measured] = {}
    timer = Timer(is_captured=is_captured)
    units, left, in_row = [], 0, False
    with restored(nn.ModuleList([chain, *([loss] if isinstance(loss, nn.Module) else [])])):
        for index, part in enumerate(parts):
            with naming("the loss" if part.is_loss else name_unit(index, part.module)):
                if part.couples and not in_row:
                    x = _enter(x, arithmetic)
                kind = kind_of(part, x, needs)
                if kind not in known:
                    known[kind] = measure_part(part, x, needs, timer)
                with torch.no_grad():
                    y = part.module(x, **part.side)
            measured, in_row = known[kind], part.couples
            entering = name_tensors(x, keys, sizes, (index, "in"))
            leaving = name_tensors(y, keys, sizes, (index, "out"))
            if part.couples:
                # What is kept of a pair beside the streams: their form on a grid, and a
                # fingerprint, with which the rebuilt pair is compared to find drift.
                own = measured.usages["reverse"].held - measured.inner["reverse"].held
                sizes[index, "pair"] = own
            units.append(list(make_options(measured, entering, leaving, (index, "pair"))))
            excess = [
                max(own) for own in zip(*(u.excess for u in measured.usages.values()), strict=True)
            ]
            add_excess(units, excess, [own.couples for own in parts])
            left += max(usage.left for usage in measured.usages.values())
            needs = needs or bool(part.weights or part.others)
            keys = dict(zip(map(address_of, tensors_of(y)), leaving, strict=True))
            x = y
    # Below the loss are its numbers and their gradients; a unit is measured with one of 4 bytes.
    extra = 2 * max(0, size_of(x) - torch.float32.itemsize)
    units[:-1] = [_with_backward(own, extra) for own in units[:-1]]
    _add_shared(units, parts)
    _add_keywords(units, parts)
    return Problem(units, sizes, left)


def make_options(
    measured: Measured, entering: list[Key], leaving: list[Key], pair: Key
) -> Iterator[Option]:
    """Yield the options of a unit, with the names of the tensors around it."""
    places = [*entering, *leaving]
    for choice, usage in measured.usages.items():
        kept = tuple(dict.fromkeys(places[place] for place in usage.keeps))
        peaks = (Peak(tuple(entering), usage.forward), Peak((), usage.backward))
        cost, inner = measured.costs[choice], measured.inner.get(choice)
        if inner is None:
            yield Option(choice, cost, usage.held, kept, peaks)
        else:
            forward = usage.forward + usage.held - inner.held
            inside = (Peak((*entering, *kept), forward), Peak((), inner.backward))
            yield Option(choice, cost, inner.held, (), inside, pair=(*kept, pair), top=peaks)


def add_excess(units: list[list[Option]], excess: Sequence[int], couples: Sequence[bool]) -> None:
    """Add to the units below the last one what gradients from it hold beyond their own bytes.

    Halves of one gradient share its memory, until both are gone. The first one goes to the unit
    below, and through a coupling to the next one.
    """
    last = len(units) - 1
    for index, extra in zip((last - 1, last - 2), excess, strict=True):
        if extra and index >= 0 and (index == last - 1 or couples[last - 1]):
            units[index] = _with_backward(units[index], extra)


def _add_shared(units: list[list[Option]], parts: Sequence[Part]) -> None:
    """Add to the units below a user of a weight its gradient, which waits for that of lower users.

    A lower user adds its own to it.
    """
    users: dict[Tensor, list[int]] = {}
    for index, part in enumerate(parts):
        for weight in part.weights:
            users.setdefault(weight, []).append(index)
    for weight, indices in users.items():
        for index in range(indices[0], indices[-1]):
            extra = weight.nbytes * (2 if index in indices else 1)
            units[index] = _with_backward(units[index], extra)


def _add_keywords(units: list[list[Option]], parts: Sequence[Part]) -> None:
    """Add to the units below a user of a keyword its gradient, which stays to the end."""
    users: dict[Tensor, list[int]] = {}
    for index, part in enumerate(parts):
        for tensor in dict.fromkeys(part.others):
            users.setdefault(tensor, []).append(index)
    for tensor, indices in users.items():
        for index in range(indices[-1]):
            # A lower user makes a sum of this gradient and its own, while both are there.
            extra = tensor.nbytes * (2 if index in indices else 1)
            units[index] = _with_backward(units[index], extra)


def _with_backward(options: Sequence[Option], extra: int) -> list[Option]:
    """Return options whose backward takes more bytes."""
    return [
        replace(
            option,
            peaks=tuple(_raised(option.peaks, extra)),
            top=tuple(_raised(option.top, extra)),
        )
        for option in options
    ]


def _raised(peaks: Sequence[Peak], extra: int) -> Iterator[Peak]:
    """Yield the peaks of a forward and a backward, the second one raised."""
    for place, peak in enumerate(peaks):
        yield peak._replace(extra=peak.extra + (extra if place else 0))


def _enter(x: Any, arithmetic: Arithmetic) -> Any:
    """Return streams as the first coupling of a row gets them."""
    with torch.no_grad():
        a, b = prepare_streams(x)
        if not arithmetic.exact:
            return a, b
        return tuple(arithmetic.real(arithmetic.store(t).stored, t.dtype) for t in (a, b))


def kind_of(part: Part, x: Any, needs: bool) -> Any:
    """Return a key that units share if they differ only in the values of their weights."""
    key = (describe((x, part.side)), needs, part.is_first)
    if part.is_loss or not isinstance(part.module, nn.Module):
        return key, id(part.module)
    return key, kind_of_module(part.module)


def name_tensors(
    x: Any, keys: dict[int, Key], sizes: dict[Key, int], prefix: tuple[Any, ...]
) -> list[Key]:
    """Return a key for every tensor, by its memory; new ones get their size."""
    named = []
    for number, tensor in enumerate(tensors_of(x)):
        key = keys.setdefault(address_of(tensor), (*prefix, number))
        sizes.setdefault(key, tensor.untyped_storage().nbytes())
        named.append(key)
    return named


def differentiate(loss: Any, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of the tensors of a loss."""
    losses = wanted_of(loss)
    if not losses or not wanted:
        raise ValueError("the loss has no gradient: it is no tensor, or all of the model is frozen")
    for own in losses:
        if own.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(own.shape)}, and must be one number, such as its mean"
            )
    return torch.autograd.grad(losses, wanted, allow_unused=True)
