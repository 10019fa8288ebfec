"""Stash of old weights, which the backward of micro-batches in flight will need."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

Version: TypeAlias = tuple[int, int]
"""Version of weights: the number of updates, and of further updates that look-ahead predicted."""


class Stash:
    """Old versions of a unit's weights.

    A version is copied right before an update overwrites it, and only if it has users (`pin` copies
    at once). For example, with versions written as their number of updates:

                 forward 7   forward 8   update    forward 9   backward 7   backward 8
                 borrow      borrow      advance   borrow      give_back    give_back
        version  2           2           3         3           3            3
        users    2: 1        2: 2        2: 2      2: 2, 3: 1  2: 1, 3: 1   3: 1
        copies   -           -           2         2           2            -

    Args:
        weights: The weights, which are updated in place.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self.version: Version = (0, 0)
        self.copies: dict[Version, list[Tensor]] = {}
        self.users: Counter[Version] = Counter()

    def borrow(self, num_ahead: int = 0, weights: Sequence[Tensor] = ()) -> Version:
        """Register a forward, whose backward will need its weights; return their version.

        Args:
            num_ahead: Number of updates that look-ahead predicts; 0 for the current weights.
            weights: The predicted weights. They are kept, not copied.
        """
        version = (self.version[0], num_ahead)
        if num_ahead:
            self.copies.setdefault(version, list(weights))
        self.users[version] += 1
        return version

    def give_back(self, version: Version) -> None:
        """Release a version after a backward; drop its copy when it has no users left."""
        self.users[version] -= 1
        if not self.users[version]:
            del self.users[version]
            self.copies.pop(version, None)

    def weights(self, version: Version) -> Sequence[Tensor]:
        """Return the weights of a version that is in use."""
        if version in self.copies:
            return self.copies[version]
        assert version == self.version, "a version in use was not copied"
        return self._weights

    def pin(self) -> Sequence[Tensor]:
        """Return a copy of the current version, for a graph that must survive the next update."""
        if self.version not in self.copies:
            self._copy()
        return self.copies[self.version]

    def advance(self) -> None:
        """Begin a new version; call this right before an update."""
        if self.users[self.version] and self.version not in self.copies:
            self._copy()
        self.version = (self.version[0] + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the version and the copies, as plain data and tensors."""
        copies = [[list(version), weights] for version, weights in self.copies.items()]
        return {"num_updates": self.version[0], "copies": copies}

    def load_state_dict(self, state: dict[str, Any], users: Iterable[Version]) -> None:
        """Resume from a state; `users` are the versions of the micro-batches in flight."""
        self.version = (state["num_updates"], 0)
        self.copies = {tuple(version): list(weights) for version, weights in state["copies"]}
        self.users = Counter(users)

    def _copy(self) -> None:
        self.copies[self.version] = [weight.detach().clone() for weight in self._weights]
