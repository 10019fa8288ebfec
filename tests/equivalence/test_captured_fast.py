"""A corner of test_captured.py that `make fast` runs, too: recorded ticks equal eager ones."""

import pytest
import torch
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


def test_a_refused_step_leaves_recorded_ticks():
    pipes = [build(CUTS[3], accumulate=2, recorded=recorded) for recorded in (True, False)]
    ours, theirs = ([run(pipe, 20)] for pipe in pipes)
    assert pipes[0].execution.is_active
    x, target = next(batches(1))
    with pytest.raises(RuntimeError):
        pipes[0].step(x[:, :3], target)
    for pipe, seen in zip(pipes, (ours, theirs), strict=True):
        seen.append(run(pipe, 20, start=20))
    assert pipes[0].execution.is_active
    assert equal(ours, theirs)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


def test_refused_steps_are_not_among_those_that_must_be_alike():
    pipes = [build(CUTS[3], accumulate=2, recorded=recorded) for recorded in (True, False)]
    ours, theirs = ([run(pipe, 8)] for pipe in pipes)
    pair = [torch.cat([tensor, tensor]) for tensor in next(batches(1))]  # of another shape

    def refuse(*args):
        raise MemoryError

    handle = pipes[0].stages[0].units[0].module.register_forward_pre_hook(refuse)
    for _ in range(9):
        with pytest.raises(MemoryError):
            pipes[0].step(*pair)
    handle.remove()
    for pipe, seen in zip(pipes, (ours, theirs), strict=True):
        seen += [pipe.step(*pair).loss for _ in range(3)]
        assert not pipe.execution.is_active  # others are in flight
        seen += [pipe.step(*pair).loss for _ in range(12)]
    assert pipes[0].execution.is_active
    assert equal(ours, theirs)
