"""Replay: run a module a second time and get the same numbers."""

from redivider.replay.call import Call as Call
from redivider.replay.call import GraphRun as GraphRun
from redivider.replay.record import Record as Record
