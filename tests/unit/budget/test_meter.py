"""Counters of bytes: those of a GPU ask for the GPU of the tensors, not the current one."""

import gc

import pytest
import torch

from redivider.budget.meter import counting, size_of

NAMES = ("memory_stats_as_nested_dict", "reset_peak_memory_stats")


def test_it_counts_on_the_gpu_of_the_tensors(monkeypatch):
    asked = []

    def stub(name, results):
        def call(device):
            asked.append((name, device))
            return next(results, None)

        monkeypatch.setattr(torch.cuda, name, call)

    other = torch.device("cuda", 1)
    weight = torch.zeros(5, requires_grad=True)
    counts = [{"current": 100}, {"current": 130}, {"peak": 160}, {"peak": 170}, {"peak": 195}]
    stub("memory_stats_as_nested_dict", iter({"allocated_bytes": {"all": own}} for own in counts))
    stub("reset_peak_memory_stats", iter(()))
    with counting(other, [weight]) as meter:
        assert not gc.isenabled(), "memory of before would be freed"
        assert meter.bytes == 30
        assert meter.moment == 1
        (2 * weight).sum().backward()  # 20 bytes, which do not count
        assert meter.peak_without(()) == 75
        assert weight.grad is not None
    assert gc.isenabled()
    assert {device for _, device in asked} == {other}
    assert {name for name, _ in asked} == {*NAMES}


@pytest.mark.parametrize("coalesced", [False, True])
def test_sizes_of_tensors(coalesced):
    x = torch.zeros(3, 4)
    assert size_of((x, x[1], None, torch.zeros(2))) == 48 + 8
    sparse = torch.zeros(100, 2).index_fill(0, torch.tensor([3]), 1.0).to_sparse(1)
    sparse = sparse.coalesce() if coalesced else sparse
    assert size_of(sparse) == 8 + 8
