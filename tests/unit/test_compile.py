"""Compiled units: the same numbers, and graphs that layers share."""

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from support.lanes import Recorded
from support.networks import MLP, Attention
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd
from redivider.backward.overlap import Overlap
from redivider.backward.strategy import Strategy
from redivider.replay import call
from redivider.replay.compiled_node import call_node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # the compiler does
]


class Counting:
    """A compiler that changes nothing and counts."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append({node.target for node in module.graph.nodes})
        return module.forward

    def with_matrices(self):
        linear = {torch._C._nn.linear, torch.nn.functional.linear}
        return sum(bool(linear & graph) for graph in self.graphs)


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def token_chain(depth, **options):
    makers = (lambda: Attention(8, 2), lambda: MLP(8))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(depth)]
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units, **options).double()


@pytest.mark.parametrize("backward", ["reverse", "checkpoint", "overlap", "store"])
def test_layers_share_two_graphs_of_a_kind_and_gradients_are_the_same(backward):
    chain = token_chain(8, backward=backward)
    plain = copy.deepcopy(chain)
    compiler = Counting()
    chain.compile(backend=compiler)
    x = torch.randn(4, 5, 6).double()
    for _ in range(3):
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    kinds = 2  # attention and MLP
    junctions = 2 * (2 if backward == "checkpoint" else 1)  # stem and head
    assert kinds + 2 <= compiler.with_matrices() <= 2 * kinds + junctions


def test_on_the_grid_reversal_stays_exact(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("not the graph of the forward")

    monkeypatch.setattr("redivider.compile._Compiled.run_joint", fails)
    chain = token_chain(5, backward="reverse", arithmetic="fixed")
    stored = copy.deepcopy(chain)
    stored.backward = "store"
    x = torch.randn(4, 5, 6).double()
    for model in (chain, stored):
        model.compile(backend=Counting())
        weigh(model(x)).backward()
    grads: dict[str, Any] = gradients(chain)
    expected: dict[str, Any] = gradients(stored)
    for key, grad in expected.items():
        assert torch.equal(grads[key], grad), key
    assert rd.check_reversible(chain, x).worst == 0.0
    assert repr(chain.arithmetic) == "Fixed(bits=20)"


def test_a_copy_starts_uncompiled_and_the_model_stays_usable():
    chain = token_chain(3)
    compiler = Counting()
    chain.compile(backend=compiler)
    x = torch.randn(4, 5, 6).double()
    other = copy.deepcopy(chain)
    y = other(x)
    assert compiler.graphs == []
    assert torch.allclose(chain(x), y) and compiler.graphs
    assert list(other.state_dict()) == list(chain.state_dict())


def test_drop_path_and_dropout_of_a_model_share_graphs_over_the_layers():
    options: dict[str, Any]
    options = {"width": 16, "heads": 2, "image_size": 8, "patch_size": 2, "in_channels": 1}
    options |= {"drop_path": 0.3, "dropout": 0.1, "attention_dropout": 0.1}
    model = rd.create_model("rev_vit_tiny", depth=8, num_classes=10, **options)
    compiler = Counting()
    model.compile(backend=compiler)
    for _ in range(3):
        model(torch.randn(4, 1, 8, 8)).sum().backward()
    # Two kinds of f, with and without drop-path, in forward and recovery; stem and head.
    assert compiler.with_matrices() <= 2 * 2 * 2 + 2


class First(nn.Module):
    def forward(self, streams):
        return streams[0]


@pytest.mark.parametrize(
    "backward, fuse",
    [
        ("reverse", rd.Fuse),
        ("reverse", First),
        ("overlap", First),
        ("checkpoint-overlap", rd.Fuse),
    ],
)
def test_compiled_functions_are_called_as_one_node_and_on_any_lane(backward, fuse, monkeypatch):
    lanes = Recorded()
    monkeypatch.setattr(Overlap, "_make_lanes", lambda self: lanes)
    if backward != "reverse":
        make = partial(Overlap, torch.device("cpu"))
        monkeypatch.setattr(Strategy, "make_overlap", lambda self, x: make())
    called: list[weakref.ref] = []

    def watched(node, *args):
        assert not any(ref() for ref in called), "what an earlier one saved is still there"
        called.append(weakref.ref(node))
        return call_node(node, *args)

    monkeypatch.setattr(call, "call_node", watched)
    couplings = list(token_chain(6))[2:-2]
    chain = rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *couplings, fuse()], backward=backward)
    chain = chain.double()
    plain = copy.deepcopy(chain)
    chain.compile(backend="aot_eager")
    x = torch.randn(4, 5, 6).double()
    for _ in range(2):
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    assert len(called) >= 12
    loss, true = weigh(chain(x)), weigh(run_plainly(plain, x))
    called.clear()
    for retain in (True, False):  # the engine must know that a graph is kept
        assert not called
        loss.backward(retain_graph=retain)
        true.backward(retain_graph=retain)
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_streams_may_be_wider_than_what_f_computes_in():
    chain = token_chain(6, backward="reverse").float()
    stored = copy.deepcopy(chain)
    stored.backward = "store"
    chain.compile(backend="aot_eager")
    x = torch.randn(4, 5, 6)
    for model in (chain, stored):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        weigh(y).backward()
    assert worst_error(gradients(chain), gradients(stored)) <= 2e-2


class Same(nn.Module):
    """A skipped layer: it has weights and returns its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "backward, f", [("checkpoint", lambda: nn.Linear(8, 8)), ("reverse", Same)]
)
def test_outputs_and_leaves_that_are_there_twice(backward, f):
    stem = nn.Sequential(nn.Linear(6, 8), rd.Duplicate())
    couplings = [rd.Coupling(f()) for _ in range(3)]
    chain = rd.Chain([stem, *couplings, rd.Fuse(), nn.Linear(16, 3)], backward=backward).double()
    plain = copy.deepcopy(chain)
    chain.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 5, 6).double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    for _ in range(2):
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, y)).backward()
    grads, true = gradients(chain, x), gradients(plain, y)
    grads = {key: grad for key, grad in grads.items() if true[key] is not None}
    assert worst_error(grads, {key: true[key] for key in grads}) <= 1e-12


class Unruly(torch.autograd.Function):
    """Does what the engine allows: one result for one input, and an output that nobody uses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, dy, dz):
        (x,) = ctx.saved_tensors
        return dy * x.cos() - dz * x.sin()


class Sine(nn.Module):
    def forward(self, x):
        y, _ = Unruly.apply(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 2 * grad)
        return y


@pytest.mark.parametrize("backward", ["checkpoint", "reverse"])
def test_functions_of_the_users_own_are_left_to_the_engine(backward):
    couplings = [rd.Coupling(Sine()) for _ in range(3)]
    chain = rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse()], backward=backward)
    chain = chain.double()
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 6).double()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_an_output_without_a_gradient_is_as_the_engine_has_it():
    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.sin(), y.cos() * 2

    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    chain = rd.Chain([Two(6, 8), First()], backward="checkpoint").double()
    plain = copy.deepcopy(chain)
    chain.compile(backend="aot_eager")
    x = torch.randn(4, 6).double()
    for _ in range(2):
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


class Product(torch.autograd.Function):
    compiled_bw = True  # as torch's own have

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, dz):
        x, y = ctx.saved_tensors
        return dz * y, dz * x


class Square(nn.Module):
    def forward(self, x):
        return Product.apply(x, x)


def test_a_leaf_that_a_node_has_twice_gets_both_gradients():
    couplings = [rd.Coupling(Square()) for _ in range(2)]
    chain = rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse()]).double()
    plain = copy.deepcopy(chain)
    x = 0.1 * torch.randn(4, 6).double()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
