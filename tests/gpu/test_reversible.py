"""Reversible models on a GPU: in half precision, captured, compiled."""

from typing import Any

import pytest
import torch
from support.compressed import Watched
from support.networks import MLP
from support.oracle import gradients, weigh, worst_error
from torch import nn

import redivider as rd
from redivider.backward import tape

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.dropout = MLP(WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.mlp(x))


def network(depth=4, dtype=torch.float32) -> Any:
    torch.manual_seed(0)
    body = nn.Sequential(*(Block() for _ in range(depth)))
    return nn.Sequential(nn.Linear(8, WIDTH), body, nn.Linear(WIDTH, 5)).to("cuda", dtype)


def inputs(dtype=torch.float32):
    return torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)


def train(model, dtype=torch.float32):
    torch.manual_seed(5)
    model.zero_grad()
    weigh(model(inputs(dtype))).backward()
    return gradients(model)


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    return Watched


@pytest.mark.parametrize("bits, most", [(1, 0.8), (3, 0.2), (8, 0.01)])
def test_outputs_are_the_plain_ones_and_gradients_close(bits, most):
    model, plain = rd.make_reversible(network(), bits), network()
    outputs = []
    for net in (model, plain):
        torch.manual_seed(5)
        outputs.append(net(inputs()))
    assert torch.equal(*outputs)
    assert worst_error(train(model), train(plain)) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_tape_is_walked_back(dtype, watched):
    train(rd.make_reversible(network(64, dtype), 2), dtype)
    assert watched.num_compared == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler(dtype, watched):
    model = rd.make_reversible(network(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = model(inputs()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watched.num_compared == 3 * 4
    pairs = zip(before, model.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)


def test_a_captured_step_is_an_eager_one():
    model, other = (rd.make_reversible(network(), 2) for _ in range(2))

    def step(net, x):
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    run = rd.capture(lambda x: step(model, x), (inputs(),))
    torch.manual_seed(7)
    captured = run(inputs())
    torch.manual_seed(7)
    eager = step(other, inputs())
    captured, eager = captured.detach(), eager.detach()
    assert captured.isfinite() and eager.isfinite()
    assert float((captured - eager).abs()) <= 0.1 * float(eager)  # other dropout masks


def test_gradients_of_a_captured_step_are_those_of_an_eager_one():
    grads = []
    for captures in (True, False):
        model = rd.make_reversible(network(), 2)
        for block in model[1]:
            block.dropout.p = 0.0
        params = list(model.parameters())

        def step(x, model=model, params=params):
            return torch.autograd.grad(weigh(model(x)), params)

        run = rd.capture(step, (torch.zeros_like(inputs()),)) if captures else step
        grads.append(torch.cat([grad.flatten() for grad in run(inputs())]))
    assert (grads[0] - grads[1]).norm() <= 1e-3 * grads[1].norm()


def test_compiled_blocks(watched):
    model, plain = rd.make_reversible(network(), 2), network()
    for net in (model, plain):
        for block in net[1]:
            block.dropout.p = 0.0
    for block in model[1]:
        block.compile()
    train(model)
    assert watched.num_compared == 4
    assert torch.allclose(model.eval()(inputs()), plain.eval()(inputs()), rtol=1e-4, atol=1e-5)
