"""Who writes what of a pipeline's state, and who needs what of it.

A unit and a stage are of the process that has them; what is known of all micro-batches is of the
first one of a column, targets and loss are of the last. Replicas have a column each.
"""

from collections.abc import Container
from typing import Any

from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.runners.topology import Team


class Parts:
    """The part of one process.

    Args:
        team: The processes.
        stages: Of this one.
        units: Their names.
    """

    def __init__(self, team: Team, stages: range, units: Container[str]) -> None:
        self._team, self._stages, self._units = team, stages, units

    def to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """What this process writes, of the state that it has."""
        wanted = {"stages", "units"}
        if self._team.place == 0:
            wanted |= set(state) - {"targets", "loss"}
        if self._team.is_last:
            wanted |= {"targets", "loss"}
        own = {key: each for key, each in state.items() if key in wanted}
        return own if self._team.num_columns == 1 else {"columns": {self._team.column: own}}

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """This replica's state, of that of all."""
        if "columns" not in state:
            return state
        if self._team.column not in state["columns"]:
            raise StateError(f"the state is not of {self._team.num_columns} replicas")
        own: dict[str, Any] = state["columns"][self._team.column]
        return own

    def wants(self, path: tuple[Any, ...]) -> bool:
        """Whether this process needs what lies under these keys in the state of all."""
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
