"""Captured ticks of a pipeline over processes compute the numbers of eager ones."""

from typing import Any

import pytest
import torch
from support.processes import ordered
from support.processes.cases import batch, equal, finish, model, options, run
from support.processes.equalities import NUM_CAPTURED, compare_captured, fused_sgd
from support.processes.launch import launch
from support.tape import Tape
from torch.distributed.device_mesh import init_device_mesh

import redivider as rd
from redivider.pipeline.runners import captured
from redivider.pipeline.runners.captured import CapturedRunner
from redivider.pipeline.stages import unit
from redivider.replay.seeded import Seeded, replayed_from

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["gloo", *ordered.MODES])
def test_two_processes(backend, tmp_path):
    settings = [
        *([{"accumulate": 2, "latency": 2}] if backend == "gloo" else []),
        {"latency": 0.5, "stages": 5},
        {"stages": [2, 7]},  # the mask travels
        {"message_dtype": torch.int8, "latency": 1.5, "accumulate": 2},
    ]
    compare_captured(settings, 2, backend, tmp_path)


@pytest.mark.parametrize("backend", ["gloo", "rendezvous"])
def test_three_processes(backend, tmp_path):
    settings: list[dict[str, Any]] = [
        {"latency": [0.5, 2, 1], "accumulate": 2, "stages": 4, "share_loss": True},
        {"clip_norm": 0.05, "clip_over": "all", "stages": 4},
    ]
    if backend == "gloo":  # they differ in what a process computes, not in its messages
        settings += [
            {"latency": 0.5},
            {"latency": 1.5, "stages": 5, "accumulate": 3, "lookahead": True},
            {"lookahead": "displacement", "accumulate": 2},
        ]
    compare_captured(settings, 3, backend, tmp_path)


@pytest.mark.parametrize("backend", ["gloo", "rendezvous"])
def test_one_process_of_three_alone_captures_and_a_flush_comes_between(backend, tmp_path):
    compare_captured([{"latency": 0.5}], 3, backend, tmp_path, ranks=(1,), flushes=True)


@pytest.mark.parametrize(
    "backend, changes",
    [
        ("gloo", {"accumulate": 2, "latency": 0.5}),  # nothing stays in the last one
        ("rendezvous", {"accumulate": 3, "stages": 3, "clip_norm": 0.05, "clip_over": "all"}),
    ],
)
def test_replicas(backend, changes, tmp_path):
    compare_captured([{"replicas": 2, **changes}], 4, backend, tmp_path)


def test_a_replica_that_captures_and_one_that_does_not(tmp_path):
    """Each is a whole pipeline in one process."""
    settings = [{"replicas": 2, "stages": 3, "accumulate": 2}]
    compare_captured(settings, 2, "gloo", tmp_path, ranks=(1,))


def note_seeds(rank):
    """Return the seeds of eager units and of replayed ticks."""
    eager, replayed = set(), set()

    def note_eager(seed, *args):
        eager.add(seed)
        return Seeded(seed, *args)

    def note_replayed(microbatch, seed, device):
        replayed.add(seed)
        return replayed_from(microbatch, seed, device)

    vars(unit)["Seeded"], vars(captured)["replayed_from"] = note_eager, note_replayed
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "stage"))
    keywords = options(optimizer=fused_sgd, mesh=mesh, stages=2)
    pipe = rd.DistributedPipeline(model(dropout=0.0, norm=False), **keywords)
    pipe.execution = CapturedRunner(pipe, Tape)
    run(pipe, 0, NUM_CAPTURED, rank)
    assert pipe.execution.is_active
    return eager, replayed


def test_replicas_draw_other_numbers_by_the_seeds_of_eager_ticks(tmp_path):
    (first, *same), (second, *alike) = launch(note_seeds, tmp_path)
    assert [first] == same and [second] == alike
    assert first != second and len(first) == len(second) == 1


def reuse_inputs(rank):
    """Return the weights of two runs; in one of them the caller overwrites inputs after a step."""
    results = []
    for overwrites in (False, True):
        net = model(dropout=0.0, norm=False)
        pipe = rd.DistributedPipeline(net, **options(latency=2, optimizer=fused_sgd))
        pipe.execution = CapturedRunner(pipe, Tape)
        run(pipe, 0, NUM_CAPTURED)
        for n in range(NUM_CAPTURED, NUM_CAPTURED + 9):
            assert pipe.execution.is_active
            x, target, mask = batch(n)
            pipe.step(x, target, mask=mask)
            if overwrites:
                for tensor in (x, target, mask):
                    tensor.zero_()
        finish(pipe)
        results.append(pipe.full_state_dict())
    return results


def test_captured_ticks_have_copies_of_what_a_step_was_given(tmp_path):
    for one, other in launch(reuse_inputs, tmp_path):
        assert equal(one, other)
