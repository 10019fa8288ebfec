"""Autocast around the forward only is honoured when f runs again in the backward."""

import copy
from typing import Any

import pytest
import torch
from support.networks import MLP, Attention, vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd

REPLAYING = ("reverse", "checkpoint")


def dtypes_of(chain: rd.Chain) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    for unit in chain:
        if isinstance(unit, rd.Coupling):
            f: Any = unit.f
            f[1].register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    return seen


@pytest.mark.parametrize("backward", REPLAYING)
def test_recovery_computes_in_the_dtype_of_the_forward(backward):
    chain, x = vector_chain(depth=3, backward=backward), torch.randn(5, 6)
    seen = dtypes_of(chain)
    with torch.autocast("cpu", torch.bfloat16):
        y = chain(x)
    weigh(y).backward()
    assert seen == [torch.bfloat16] * 6


@pytest.mark.parametrize("backward", REPLAYING)
def test_autocast_around_the_backward_only_is_not(backward):
    chain, x = vector_chain(depth=3, backward=backward), torch.randn(5, 6)
    seen = dtypes_of(chain)
    y = chain(x)
    with torch.autocast("cpu", torch.bfloat16):
        weigh(y).backward()
    assert seen == [torch.float32] * 6


@pytest.mark.parametrize("backward, bound", [("checkpoint", 0.0), ("reverse", 2e-2)])
def test_gradients_are_those_of_the_plain_model_under_autocast(backward, bound):
    """The streams stay float32; recovering them costs rounding, keeping the input costs none."""
    couplings = [rd.Coupling(MLP(6)) for _ in range(6)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward=backward)
    plain = copy.deepcopy(chain)
    x = torch.randn(32, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, true = chain(x), run_plainly(plain, x)
    assert torch.equal(y, true)
    weigh(y).backward()
    weigh(true).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= bound


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_streams_stay_float32_though_the_stem_gives_half_precision(arithmetic, backward):
    chain, x = vector_chain(depth=3, backward=backward, arithmetic=arithmetic), torch.randn(5, 6)
    seen: list[torch.dtype] = []
    chain[0].register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    for unit in chain:
        if isinstance(unit, rd.Coupling):
            unit.f.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    for context in (torch.enable_grad(), torch.no_grad()):
        seen.clear()
        with context, torch.autocast("cpu", torch.bfloat16):
            chain(x)
        assert seen == [torch.bfloat16] + [torch.float32] * 3


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_weight_shared_with_the_outside_keeps_its_gradient(backward):
    """f casts it without a graph; the outside must not get that cast from autocast's cache."""
    chain = vector_chain(depth=2, backward=backward, check_every=0)
    linear = chain[2].f[1]
    x = torch.randn(5, 6)
    for _ in range(2):  # the first forward of f builds a graph, the second one does not
        chain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            chain(x)
            outside = nn.functional.linear(torch.ones(8), linear.weight)
        outside.float().sum().backward()
        assert torch.equal(linear.weight.grad, torch.ones(16, 8))


@pytest.mark.parametrize("backward", REPLAYING)
def test_scaled_losses_give_scaled_gradients(backward):
    chain = vector_chain(Attention, 4, backward=backward)
    x = torch.randn(2, 5, 6)
    weigh(chain(x)).backward()
    grads: dict[str, Any] = gradients(chain)
    once = {name: grad.clone() for name, grad in grads.items()}
    chain.zero_grad()
    (weigh(chain(x)) * 1024).backward()
    scaled: dict[str, Any] = gradients(chain)
    for name, grad in scaled.items():
        assert torch.equal(grad, once[name] * 1024), name


@pytest.mark.parametrize("backward", REPLAYING)
def test_grad_scaler_trains_and_skips_a_step_that_is_not_finite(backward):
    chain = vector_chain(MLP, 4, backward=backward)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = chain[2].f[1].weight.clone()
    for factor, changes in ((torch.inf, False), (1.0, True)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = weigh(chain(torch.randn(5, 6))) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, chain[2].f[1].weight) != changes
