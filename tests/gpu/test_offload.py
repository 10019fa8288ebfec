"""Inputs that wait in host memory, on a GPU."""

import pytest
import torch
from support.networks import MLP
from torch import nn

import redivider as rd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDTH, BATCH, DEPTH = 256, 4096, 24
INPUT = WIDTH * BATCH * 4  # bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP(WIDTH)

    def forward(self, x):
        return x + nn.functional.dropout(self.mlp(x), 0.1)


def network(backward):
    torch.manual_seed(0)
    return rd.Chain([Block() for _ in range(DEPTH)], backward=backward).cuda()


def inputs(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, WIDTH, generator=generator).cuda().requires_grad_()


def test_gradients_are_those_of_checkpointing():
    results = []
    for backward in ("checkpoint", "offload"):
        chain = network(backward)
        optimizer = torch.optim.SGD(chain.parameters(), lr=0.01, foreach=False)
        torch.manual_seed(1)
        for number in range(6):
            x = inputs(number)
            optimizer.zero_grad()
            chain(x).square().mean().backward()
            optimizer.step()
            results.append([x.grad, *(param.detach().clone() for param in chain.parameters())])
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_only_few_inputs_stay_on_the_gpu():
    held = {}
    for backward in ("checkpoint", "offload"):
        chain, x = network(backward), inputs(0)
        chain(x).mean().backward()  # libraries warm up
        before = torch.cuda.memory_allocated()
        loss = chain(x).mean()
        held[backward] = (torch.cuda.memory_allocated() - before) / INPUT
        loss.backward()
    assert held["checkpoint"] >= DEPTH - 1.5
    assert held["offload"] <= 3.5


def test_a_captured_step_is_refused():
    chain = network("offload")

    def step(x):
        loss = chain(x).mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match='use "checkpoint" or "reverse"'):
        rd.capture(step, (inputs(0).detach(),))
