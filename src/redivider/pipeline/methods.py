"""What a unit keeps between forward and backward, and which weights the backward sees.

    method              a coupling keeps   a junction keeps   weights in the backward
    petra               nothing            input              current
    dsp                 input              input              current
    delayed             input              input              stashed
    delayed-graph       graph              graph              stashed
    exact-inverse       nothing            input              stashed
    approximate-input   nothing            input              inverse: current; gradient: stashed

PETRA: Rivaud et al. 2025; DSP: Xu et al. 2020; delayed: PipeDream, Narayanan et al. 2019;
delayed-graph: ADL, Zhuang et al. 2021; the last two are PETRA's ablations.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from redivider.row import Keep


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    coupling: Keep
    junction: Keep
    weights: Literal["current", "stashed"]
    inverse: Literal["current", "stashed"]


METHODS = {
    method.name: method
    for method in (
        Method("petra", "nothing", "input", "current", "current"),
        Method("dsp", "input", "input", "current", "current"),
        Method("delayed", "input", "input", "stashed", "stashed"),
        Method("delayed-graph", "graph", "graph", "stashed", "stashed"),
        Method("exact-inverse", "nothing", "input", "stashed", "stashed"),
        Method("approximate-input", "nothing", "input", "stashed", "current"),
    )
}


def resolve_method(name: str) -> Method:
    """Look a method up."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {name!r}")
    return METHODS[name]


Version: TypeAlias = tuple[int, int]
"""Weights after so many updates, and looked ahead from there by so many more."""


class Stash:
    """Old versions of some weights, each kept while a micro-batch in flight was forwarded by it.

    A version is copied when it is about to be overwritten, and only if it will be asked for: with
    nothing in flight nothing is ever copied.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self.version: Version = (0, 0)
        self.copies: dict[Version, list[Tensor]] = {}
        self.users: Counter[Version] = Counter()

    def borrow(self, num_ahead: int = 0, weights: Sequence[Tensor] = ()) -> Version:
        """A forward uses the present version, and its backward will ask for it.

        Or it uses weights that were predicted from it, which are taken in as they are.
        """
        version = (self.version[0], num_ahead)
        if num_ahead:
            self.copies.setdefault(version, list(weights))
        self.users[version] += 1
        return version

    def give_back(self, version: Version) -> None:
        """That backward is done."""
        self.users[version] -= 1
        if not self.users[version]:
            del self.users[version]
            self.copies.pop(version, None)

    def weights(self, version: Version) -> Sequence[Tensor]:
        """The weights as they were."""
        if version in self.copies:
            return self.copies[version]
        assert version == self.version, "a version in use was not copied"
        return self._weights

    def pin(self) -> Sequence[Tensor]:
        """Copy the present version now, for a graph that must outlive it."""
        if self.version not in self.copies:
            self._copy()
        return self.copies[self.version]

    def advance(self) -> None:
        """The weights are about to change."""
        if self.users[self.version] and self.version not in self.copies:
            self._copy()
        self.version = (self.version[0] + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain data and tensors."""
        copies = [[list(version), weights] for version, weights in self.copies.items()]
        return {"num_updates": self.version[0], "copies": copies}

    def load_state_dict(self, state: dict[str, Any], users: Iterable[Version]) -> None:
        """Continue from such a state; `users` are the versions of what is in flight."""
        self.version = (state["num_updates"], 0)
        self.copies = {tuple(version): list(weights) for version, weights in state["copies"]}
        self.users = Counter(users)

    def _copy(self) -> None:
        self.copies[self.version] = [each.detach().clone() for each in self._weights]
