"""Rollback of a step, and refusal of what a graph cannot follow; on the CPU."""

import pytest
import torch
from support.networks import vector_chain
from support.oracle import weigh

import redivider as rd
from redivider.chain import observing
from redivider.gpu.rollback import Rollback, Settings


@pytest.fixture
def state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    return Rollback(torch.device("cpu"))


def train(chain, optimizer, x):
    optimizer.zero_grad()
    weigh(chain(x)).backward()
    optimizer.step()


def run(state, chain, optimizer, steps=2):
    with observing(state.add_chain), state.watching_optimizers():
        for _ in range(steps):
            train(chain, optimizer, torch.randn(5, 6))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_weights_state_gradients_and_random_numbers_are_restored(state, make, stepped):
    chains = [vector_chain(depth=3) for _ in range(2)]
    chains[1].load_state_dict(chains[0].state_dict())
    optimizers = [make(chain.parameters(), lr=1e-2) for chain in chains]
    for chain, optimizer in zip(chains, optimizers, strict=True):
        if stepped:
            torch.manual_seed(3)
            train(chain, optimizer, torch.randn(5, 6))
            optimizer.zero_grad()
    torch.manual_seed(4)
    state._random = torch.get_rng_state(), None
    run(state, chains[0], optimizers[0])
    assert any(
        not torch.equal(a, b)
        for a, b in zip(chains[0].parameters(), chains[1].parameters(), strict=True)
    )
    state.restore()
    assert all(param.grad is None for param in chains[0].parameters())
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(4))
    for _ in range(3):
        x = torch.randn(5, 6)
        for chain, optimizer in zip(chains, optimizers, strict=True):
            train(chain, optimizer, x)
    for one, other in zip(chains[0].parameters(), chains[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_each_is_met_once_and_before_it_changes(state):
    chain = vector_chain(depth=2)
    before = [param.clone() for param in chain.parameters()]
    run(state, chain, torch.optim.SGD(chain.parameters(), lr=0.1), steps=3)
    assert len(state.chains) == len(state.optimizers) == 1
    assert len(state.parameters) == len(before)
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(chain.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW(p), r"AdamW counts .* capturable=True or fused=True"),
        (lambda p: torch.optim.Adafactor(p), r"Adafactor keeps 'step' on the host"),
        (
            lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5),
            "cannot roll back SGD .* unknown",
        ),
    ],
)
def test_optimizers_that_a_graph_would_run_wrongly_are_refused(state, make, message, monkeypatch):
    chain = vector_chain(depth=2)
    run(state, chain, make(chain.parameters()), steps=1)
    if "dampening" in str(make.__code__.co_consts) or "SGD" in message:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with pytest.raises(rd.CaptureError, match=message):
        state.prepare_optimizers()


def test_settings_other_than_the_rate_may_not_change():
    chain = vector_chain(depth=2)
    optimizer = torch.optim.AdamW(chain.parameters(), lr=torch.tensor(1e-2))
    train(chain, optimizer, torch.randn(5, 6))
    settings, rate = Settings([optimizer]), optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    settings.refresh()
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.5
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    settings.refresh()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.05)
    assert scheduler.get_last_lr()
    optimizer.param_groups[0]["weight_decay"] = 0.3
    with pytest.raises(rd.CaptureError, match=r"with weight_decay = 0.01 and cannot have 0.3"):
        settings.refresh()
    optimizer.param_groups[0]["weight_decay"] = 0.01
    settings.refresh()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(rd.CaptureError, match="as after load_state_dict; capture the step again"):
        settings.refresh()


def test_a_rate_that_is_a_number_in_the_graph_stays():
    chain = vector_chain(depth=2)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    settings = Settings([optimizer])
    settings.refresh()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(rd.CaptureError, match=r"lr = 0.1 and cannot have 0.2; a fused one can"):
        settings.refresh()
