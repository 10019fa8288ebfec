"""Gradients of inputs first and of weights later are those of one backward, at the same cost."""

import gc
import weakref

import pytest
import torch
from support.networks import MLP, Attention, ConvNorm
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from redivider.pipeline.stages.split_backward import pull_back_first
from redivider.replay import Call


class Tied(nn.Module):
    """Uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class Hooked(nn.Module):
    """Puts a hook on a tensor between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.one(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: 3 * grad)
        return self.two(torch.tanh(hidden))


class Scale(torch.autograd.Function):
    num_backwards = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        Scale.num_backwards += 1
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


class Custom(nn.Module):
    """Has a function of Python with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(Scale.apply(x, self.weight.expand_as(x)))


class Aside(nn.Module):
    """Returns two tensors, one of which does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.unused = nn.Parameter(torch.rand(2))

    def forward(self, x):
        return self.linear(x) * self.weight[:1], self.weight.square().expand(4, 8) + 0


def tokens():
    return torch.randn(4, 6, 8)


CASES = {
    "mlp": (lambda: MLP(8), tokens, True),
    "attention": (lambda: Attention(8), tokens, True),
    "norm": (lambda: nn.LayerNorm(8), tokens, False),
    "convolution": (lambda: ConvNorm(4), lambda: torch.randn(2, 4, 5, 5), True),
    "hooked": (Hooked, lambda: torch.randn(4, 8), True),  # on the output of a product itself
    "tied": (Tied, tokens, False),
    "custom": (Custom, tokens, True),
    "aside": (Aside, lambda: torch.randn(4, 8), True),
}


def run_of(module, x, autocast=False):
    call, tensors = Call.split(module, (x.requires_grad_(),), {})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        run, _ = call.only_run(tensors, [tensor.requires_grad for tensor in tensors])
    return run


def outputs_of(run):
    return run.output if isinstance(run.output, tuple) else (run.output,)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_backward(name, autocast):
    make, draw, is_split = CASES[name]
    module, x = make(), draw()
    list(module.parameters())[-1].requires_grad_(name != "mlp")  # with a frozen one
    grads = [torch.randn(y.shape) for y in outputs_of(run_of(module, x, autocast))]
    expected = run_of(module, x, autocast).pull_back(grads)
    Scale.num_backwards = 0
    first, others = pull_back_first(run_of(module, x, autocast), grads, 1)
    with FlopCounterMode(display=False) as counter:
        later = others()
    assert (counter.get_total_flops() > 0) == is_split
    assert Scale.num_backwards == (name == "custom")
    for one, other in zip(expected, [*first, *later], strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_weights_wait_and_nothing_is_computed_twice():
    module, x = MLP(8), tokens()
    grads = [torch.randn(4, 6, 8)]
    run = run_of(module, x)
    with FlopCounterMode(display=False) as whole:
        run.pull_back(grads)
    run = run_of(module, x)
    with FlopCounterMode(display=False) as inputs:
        _, others = pull_back_first(run, grads, 1)
    with FlopCounterMode(display=False) as weights:
        others()
    counts = [counter.get_total_flops() for counter in (inputs, weights, whole)]
    assert counts[0] > 0 and counts[0] + counts[1] == counts[2] == 2 * counts[1]


def test_the_graph_is_freed_when_all_is_computed():
    module, x = MLP(8), tokens()
    hidden = []
    module[2].register_forward_hook(lambda *args: hidden.append(weakref.ref(args[-1])))
    run = run_of(module, x)
    _, others = pull_back_first(run, [torch.randn(4, 6, 8)], 1)
    assert hidden[0]() is not None
    gc.disable()  # no cycle keeps it
    try:
        others()
        del run, others
        assert hidden[0]() is None
    finally:
        gc.enable()
