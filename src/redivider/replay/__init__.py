"""Running a module a second time and getting the same numbers."""

from redivider.replay.call import Call as Call
from redivider.replay.call import GraphRun as GraphRun
from redivider.replay.call import writes_error as writes_error
from redivider.replay.record import Record as Record
