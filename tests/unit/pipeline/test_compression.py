"""Messages in fewer bits: what arrives, how many bytes travel, and what it costs the gradient."""

import pytest
import torch
from support.processes.cases import batch, model, options

import redivider as rd
from redivider.pipeline.stages.compression import Packing


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)])
def test_what_arrives(dtype, most):
    torch.manual_seed(0)
    x = torch.randn(4, 7, 5) * torch.tensor([1e-6, 1.0, 3.0, 1e4])[:, None, None]
    packed = Packing(dtype).pack(x)
    there = Packing(dtype).unpack(packed, x.dtype)
    largest = x.abs().amax((1, 2), keepdim=True)
    assert there.dtype == x.dtype and ((there - x).abs() <= largest * most * 1.01).all()
    assert packed[0].dtype == dtype and packed[0].nbytes == x.numel() * dtype.itemsize
    assert sum(tensor.nbytes for tensor in packed[1:]) <= 4 * len(x)
    assert torch.equal(Packing(dtype).rounded(x), there)


def test_what_is_not_packed():
    packing = Packing(torch.int8)
    for x in (
        torch.arange(5),
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bool),
    ):
        assert packing.rounded(x) is packing.pack(x)[0] or torch.equal(packing.rounded(x), x)
    zeros = torch.zeros(2, 3)
    assert torch.equal(packing.rounded(zeros), zeros)
    assert packing.rounded(torch.tensor([[1.0, float("nan")]])).isnan().any()  # never in silence
    assert packing.rounded(torch.tensor([[1.0, float("inf")]])).isnan().any()
    with pytest.raises(
        ValueError, match=r"message_dtype must be None, torch\.bfloat16 or torch\.int8"
    ):
        Packing(torch.float16)


@pytest.mark.slow
def test_the_probe_measures_what_it_costs():
    errors = {}
    for dtype in (None, torch.bfloat16, torch.int8):
        pipe = rd.Pipeline(
            model(dropout=0.0, norm=False), stages=5, **options(message_dtype=dtype, lr_lambda=None)
        )
        for stage in pipe.stages:  # weights that stay: then all that differs is the rounding
            for group in stage.groups:
                group["lr"] = 0.0
        probe = pipe.probe(every=1)
        for n in range(20):
            x, target, mask = batch(n)
            pipe.step(x, target, mask=mask)
        rows = [row for row in probe.qualities if row.stage == 2]
        cosine = sum(1 - row.cosine for row in rows) / len(rows)
        errors[dtype] = cosine, max(row.rebuilt_error for row in rows)
    assert errors[None][0] < 1e-6 < errors[torch.bfloat16][0] < errors[torch.int8][0] < 0.1
    assert errors[None][1] < 1e-6 < errors[torch.bfloat16][1] < errors[torch.int8][1] < 0.1
