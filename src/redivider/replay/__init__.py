"""Running a module a second time and getting the same numbers."""

from redivider.replay.call import Call as Call
from redivider.replay.call import Rerun as Rerun
from redivider.replay.record import Record as Record
