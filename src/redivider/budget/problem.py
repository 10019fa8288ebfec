"""Problem of a budget: the options of every unit, and what a plan of them holds.

While unit i runs, in the forward or the backward, units 0 to i hold what they keep, and those above
hold nothing yet or nothing any more. So for every i

    sum over j <= i of held(j)  +  extra(i)  <=  memory

Some tensors lie between units, and several units may keep them: a stream that one unit gives and
the next one keeps, or the pair at the top of a run of reversed couplings. They count once. Whether
a reversed coupling is a top depends on the unit above it.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

Key: TypeAlias = Hashable  # names a tensor between units
State: TypeAlias = tuple[int, frozenset[Key]]
"""Choice of the unit below if it may be a top, else -1; kept tensors that later units may share."""


class Peak(NamedTuple):
    """A moment in which a unit needs bytes beyond those that it and lower units hold."""

    alive: tuple[Key, ...]
    """Tensors between units that are there, kept or not."""
    extra: int


@dataclass(frozen=True)
class Option:
    """One choice for a unit: what it costs and what it needs."""

    choice: str
    cost: float
    """Added work or time, not negative."""
    held: int
    """Bytes that no other unit shares, between its forward and its backward."""
    keeps: tuple[Key, ...]
    """Tensors between units that it holds as well."""
    peaks: tuple[Peak, ...]
    pair: tuple[Key, ...] = ()
    """Output of a reversed coupling, which it keeps unless the unit above is reversed, too."""
    top: tuple[Peak, ...] = ()
    """Peaks of a reversed coupling that keeps its output."""


@dataclass(frozen=True)
class Problem:
    """Options of every unit, from the bottom, and the sizes of tensors between units."""

    units: Sequence[Sequence[Option]]
    sizes: Mapping[Key, int]
    always: int = 0
    """Bytes that are there in every moment."""

    def size(self, keys: Iterable[Key]) -> int:
        """Return the bytes of some tensors."""
        return sum(self.sizes[key] for key in keys)

    def without(self, choice: str) -> "Problem":
        """Return the problem without the options of a choice."""
        units = [[option for option in own if option.choice != choice] for own in self.units]
        return replace(self, units=units)

    def by_bytes(self) -> "Problem":
        """Return the problem in which an option costs the bytes that it takes beyond others."""

        def size(option: Option) -> int:
            keys = {*option.keeps, *option.pair}
            return option.held + self.size(keys) + max(peak.extra for peak in option.peaks)

        units = []
        for own in self.units:
            least = min(map(size, own))
            units.append([replace(option, cost=size(option) - least) for option in own])
        return replace(self, units=units)

    def need(self, peaks: Iterable[Peak], kept: frozenset[Key]) -> int:
        """Return the bytes of the largest peak, beyond what is held."""
        needs = (self.size({*alive} - kept) + extra for alive, extra in peaks)
        return self.always + max(needs, default=0)

    @cached_property
    def steps(self) -> list[dict[State, list["Step"]]]:
        """Options of every unit, and an end above them, by the state before."""
        # The choice of a reversed coupling is settled by the unit above it.
        last_use = {
            key: index + any(option.pair for option in options)
            for index, options in enumerate(self.units)
            for key in _keys(options)
        }
        states: set[State] = {(-1, frozenset())}
        steps: list[dict[State, list[Step]]] = []
        for index, options in enumerate([*self.units, [_END]]):
            below = self.units[index - 1]
            steps.append(
                {
                    state: [
                        self._step(state, below, number, option, index, last_use)
                        for number, option in enumerate(options)
                    ]
                    for state in states
                }
            )
            states = {step.state for own in steps[-1].values() for step in own}
        # What the units above need at least is needed before a step, too.
        needs = dict.fromkeys(states, 0)
        for index, here in reversed(list(enumerate(steps))):
            steps[index] = {
                before: [s._replace(need=max(s.need, s.held + needs[s.state])) for s in own]
                for before, own in here.items()
            }
            needs = {s: min(step.need for step in own) for s, own in steps[index].items()}
        return steps

    def _step(
        self,
        state: State,
        below: Sequence[Option],
        number: int,
        option: Option,
        index: int,
        last_use: Mapping[Key, int],
    ) -> "Step":
        pending, kept = state
        held = need = 0
        if pending >= 0:  # now it is known whether the unit below is a top
            if not option.pair:
                held = self.size({*below[pending].pair} - kept)
                kept |= {*below[pending].pair}
            peaks = below[pending].peaks if option.pair else below[pending].top
            need = held + self.need(peaks, kept)
        held += option.held + self.size({*option.keeps} - kept)
        kept |= {*option.keeps}
        if not option.pair:
            need = max(need, held + self.need(option.peaks, kept))
        known = frozenset(key for key in kept if last_use[key] > index)
        state = (number if option.pair else -1, known)
        return Step((number,), state, option.cost, held, need)


class Step(NamedTuple):
    """Options of a unit, or of a few, in a state: the state after them, their cost, and bytes."""

    numbers: tuple[int, ...]
    state: State
    cost: float
    held: int
    """Bytes that it adds to those held."""
    need: int
    """Bytes that must be free before it, for it and all units above."""


_END = Option("", 0, 0, (), ())


def _keys(options: Sequence[Option]) -> set[Key]:
    peaks = [peak for option in options for peak in (*option.peaks, *option.top)]
    kept = {key for option in options for key in (*option.keeps, *option.pair)}
    return kept | {key for peak in peaks for key in peak.alive}


def find_least(problem: Problem) -> int:
    """Return the smallest number of bytes for which there is a plan."""
    return min(step.need for own in problem.steps[0].values() for step in own)


def trace(problem: Problem, choices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bytes held by the units up to every unit, and its peak with them."""
    kept: frozenset[Key] = frozenset()
    options = [own[choice] for own, choice in zip(problem.units, choices, strict=True)]
    held, rows = 0, []
    for option, above in zip(options, [*options[1:], _END], strict=True):
        is_top = bool(option.pair) and not above.pair
        keys = {*option.keeps, *(option.pair if is_top else ())} - kept
        kept |= keys
        held += option.held + problem.size(keys)
        rows.append((held, held + problem.need(option.top if is_top else option.peaks, kept)))
    return rows
