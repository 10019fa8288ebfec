"""Muon on a GPU: in bf16, without waiting for the device, and captured."""

import pytest
import torch
import torch.nn.functional as F
from support.muon import Oracle, set_grads
from support.networks import MLP
from torch import nn

import redivider as rd

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler's own
]


def network():
    torch.manual_seed(0)
    units = [nn.Linear(8, 32), rd.Duplicate(), *(rd.Coupling(MLP(32)) for _ in range(4))]
    return rd.Chain([*units, rd.Fuse(), nn.Linear(64, 5)]).cuda()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 8, generator=generator)
    return x.cuda(), torch.randint(5, (16,), generator=generator).cuda()


def test_steps_follow_the_equations():
    net = nn.Sequential(nn.Linear(64, 32), nn.Conv2d(16, 24, 3), nn.Linear(32, 64)).cuda()
    weights = [param for param in net.parameters() if param.ndim > 1]
    optimizer = rd.Muon(net, 0.02, weight_decay=0.1)
    oracle = Oracle(weights, 0.02, 0.95, True, 0.1, "match_rms_adamw")
    before = [weight.detach().clone().cpu() for weight in weights]
    for number in range(5):
        set_grads(weights, number)
        optimizer.step()
        oracle.step([weight.grad for weight in weights])
    for weight, start, expected in zip(weights, before, oracle.weights, strict=True):
        moved = (expected - start).norm()
        assert (weight.cpu() - expected).norm() <= 2e-2 * moved


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_a_step_does_not_wait_for_the_device(rest):
    net = network()
    optimizer = rd.Muon(net, 0.02, weight_decay=0.1, rest=rest)
    set_grads(net.parameters(), 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(net, optimizer, x, target):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), target)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_a_captured_step_is_an_eager_one(rest):
    one, other = network(), network()
    optimizers = [rd.Muon(net, 0.02, weight_decay=0.1, rest=rest) for net in (one, other)]
    step = rd.capture(lambda x, t: train(one, optimizers[0], x, t), batch(0))
    for number in range(8):
        captured, eager = step(*batch(number)), train(other, optimizers[1], *batch(number))
        assert torch.allclose(captured, eager, rtol=1e-5)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def by_muon(stage):
    """Return Muon with a rate as captured ticks have it: bf16 makes large errors of small ones."""
    return rd.Muon(stage, torch.tensor(0.02, device="cuda"), weight_decay=0.1)


@pytest.mark.parametrize("changes", [{}, {"latency": 0.5, "accumulate": 2}, {"clip_norm": 0.1}])
@pytest.mark.parametrize("compiles", [False, True])
def test_captured_ticks_are_eager_ones(compiles, changes):
    results = []
    for capture in (False, True):
        net = network()
        pipe = rd.Pipeline(
            net,
            stages=3,
            loss=F.cross_entropy,
            optimizer=by_muon,
            lr_lambda=lambda update: 1 / (1 + 0.05 * update),
            capture=capture,
            **changes,
        )
        if compiles:
            pipe.compile(options={"deterministic": True})  # else kernels are tuned in each run
        losses = [pipe.step(*batch(number)).loss for number in range(40)]
        assert pipe.execution.is_active == capture
        pipe.flush()
        results.append([loss for loss in losses if loss is not None] + list(net.parameters()))
    for eager, captured in zip(*results, strict=True):
        assert torch.equal(eager, captured)
