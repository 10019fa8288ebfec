"""A corner of test_captured.py that `make fast` runs, too: recorded ticks equal eager ones."""

from support.captured import CUTS, build, run
from support.oracle import equal


def test_recorded_ticks_are_those_of_lockstep():
    pipes = [build(CUTS[3], accumulate=2, recorded=recorded) for recorded in (True, False)]
    assert equal(*[run(pipe, 26) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())
