"""Parts of a pipeline's state: which process writes what, and which process reads what.

    key of the state       written by
    "units", "stages"      the process that holds the unit or the stage
    "targets", "loss"      the last process of a column
    everything else        the first process of a column

A replica is a column of processes. With several replicas, the state of each lies under "columns".
"""

from collections.abc import Container
from typing import Any

from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.runners.topology import Team


class Parts:
    """Part of one process in the state of all.

    Args:
        team: The processes.
        stages: Stages of this process.
        units: Names of its units.
    """

    def __init__(self, team: Team, stages: range, units: Container[str]) -> None:
        self._team, self._stages, self._units = team, stages, units

    def to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of this process's state that it writes."""
        keys = {"stages", "units"}
        if self._team.place == 0:
            keys |= set(state) - {"targets", "loss"}
        if self._team.is_last:
            keys |= {"targets", "loss"}
        own = {key: value for key, value in state.items() if key in keys}
        return own if self._team.num_columns == 1 else {"columns": {self._team.column: own}}

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of this replica from the state of all."""
        if "columns" not in state:
            return state
        if self._team.column not in state["columns"]:
            raise StateError(f"the state is not of {self._team.num_columns} replicas")
        own: dict[str, Any] = state["columns"][self._team.column]
        return own

    def wants(self, path: tuple[Any, ...]) -> bool:
        """Return whether this process reads what lies under a path of keys in the state of all."""
        match path:
            case ("columns", column, *rest):
                return column == self._team.column and (not rest or self.wants(tuple(rest)))
            case ("units", name):
                return name in self._units
            case ("stages", j):
                return j in self._stages
            case ("loss",):
                return self._team.is_last
        return True
