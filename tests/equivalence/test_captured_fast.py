"""A corner of test_captured.py that `make fast` runs, too: recorded ticks equal eager ones."""

from support.captured import CUTS, build, run
from support.oracle import equal
from support.pipelines import batches
from support.tape import Tape

from redivider.pipeline.runners.captured import CapturedRunner


def test_recorded_ticks_are_those_of_lockstep():
    pipes = [build(CUTS[3], accumulate=2, recorded=recorded) for recorded in (True, False)]
    assert equal(*[run(pipe, 26) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


def test_stages_that_update_go_first():
    pipe, tapes = build(CUTS[3], accumulate=4), []

    def make_graphs(num_lanes):
        tapes.append(Tape(num_lanes))
        return tapes[0]

    pipe.execution = CapturedRunner(pipe, make_graphs)
    run(pipe, 40)
    assert pipe.execution.is_active
    updates = []
    for x, target in list(batches(48))[40:]:  # a cycle
        before = [stage.num_updates for stage in pipe.stages]
        pipe.step(x, target)
        pairs = zip(pipe.stages, before, strict=True)
        updates.append({stage.index for stage, number in pairs if stage.num_updates > number})
    lanes = [{0: {0, 3}, 1: {1, 4}, 2: {5}}[min(stages)] if stages else set() for stages in updates]
    recorded = tapes[0].preferred
    assert len(recorded) == 8 and all(len(stages) <= 1 for stages in updates)
    assert lanes in [recorded[start:] + recorded[:start] for start in range(8)]
