"""A pipeline over processes: the numbers of one process, to the last bit."""

import pytest
import torch

import redivider as rd
from distributed.cases import batch, finish, model, options, run
from distributed.launch import launch
from pipeline.reference import METHODS


def train(rank, cases):
    found = []
    for changes in cases:
        pipe = rd.DistributedPipeline(model(), **options(**changes))
        losses = run(pipe, 0, 40)
        x, _, mask = batch(99)
        output = pipe.evaluate(x if rank == 0 else None, **({"mask": mask} if rank == 0 else {}))
        losses += finish(pipe)
        found.append((losses, output, pipe.full_state_dict(), len(pipe._units)))
        assert not pipe._known and not pipe._waiting_targets
        pipe.close()
    return found


def compare(cases, world_size, tmp_path):
    torch.set_num_threads(1)
    results = launch(train, tmp_path, cases, world_size=world_size)
    for changes, *ours in zip(cases, *results, strict=True):
        pipe = rd.Pipeline(model(), **options(**{"stages": world_size, **changes}))
        losses = run(pipe, 0, 40)
        x, _, mask = batch(99)
        output = pipe.evaluate(x, mask=mask)
        losses += finish(pipe)
        weights = pipe.full_state_dict()
        assert len(losses) == 40
        for rank, (_, there, full, _) in enumerate(ours):
            assert torch.equal(there, output), (changes, rank)
            assert list(full) == list(weights)
            assert all(torch.equal(full[name], weights[name]) for name in weights), (changes, rank)
        for (n, one), (m, other) in zip(losses, ours[-1][0], strict=True):
            assert n == m and torch.equal(one, other)
        assert all(not losses for losses, *_ in ours[:-1])
        assert sum(num for *_, num in ours) == len(pipe._units)


def test_two_processes(tmp_path):
    cases = [{"method": method} for method in METHODS]
    cases += [
        {"accumulate": 3, "latency": 2},
        {"stages": [1, 2, 3, 1, 2], "accumulate": 3},
        {"arithmetic": "fixed", "clip_norm": 0.5, "clip_over": "all"},
        {"lookahead": "momentum", "latency": 2},
        {"message_dtype": torch.bfloat16},
        {"message_dtype": torch.int8, "stages": 5},
    ]
    compare(cases, 2, tmp_path)


def test_three_processes(tmp_path):
    cases = [
        {},
        {"stages": [4, 1, 4], "accumulate": 3, "clip_norm": 0.5},
        {"stages": 9, "latency": 2, "method": "delayed"},
    ]
    compare(cases, 3, tmp_path)


def test_four_processes(tmp_path):
    cases = [
        {"accumulate": 3},
        {"stages": [1, 3, 2, 1, 1, 1], "latency": 2, "method": "exact-inverse"},
        {"stages": 7, "clip_norm": 0.5, "clip_over": "all", "accumulate": 3},
    ]
    compare(cases, 4, tmp_path)
