"""Captured ticks of a pipeline over processes compute the numbers of eager ones."""

import pytest
from support.processes import ordered
from support.processes.equalities import compare_captured

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["gloo", *ordered.MODES])
def test_two_processes(backend, tmp_path):
    settings = [
        {"accumulate": 2, "latency": 2},
        {"latency": 0.5, "stages": 5},
        {"stages": [2, 7]},  # the mask travels
    ]
    compare_captured(settings, 2, backend, tmp_path)


@pytest.mark.parametrize("backend", ["gloo", "rendezvous"])
def test_three_processes(backend, tmp_path):
    settings = [
        {},
        {"latency": 0.5},
        {"latency": [0.5, 2, 1], "accumulate": 2, "stages": 4, "share_loss": True},
        {"latency": 1.5, "stages": 5, "accumulate": 3, "lookahead": "momentum"},
        {"clip_norm": 0.05, "clip_over": "all", "stages": 4},
    ]
    compare_captured(settings, 3, backend, tmp_path)
