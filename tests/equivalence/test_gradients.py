"""Gradients of every backward equal plain autograd's, for every parameter and input, in float64."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.networks import MLP, Attention, Buffered, ConvNorm, Twice, vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd

SLOW = pytest.mark.slow
DEPTHS = [1, 2, 3, *(pytest.param(depth, marks=SLOW) for depth in (4, 7, 8, 64))]
BACKWARDS = ("reverse", "checkpoint", "store")
BOUND = 1e-12

VECTORS = {
    "mlp": lambda: MLP(8),
    "dropout": lambda: MLP(8, dropout=0.5),
    "buffers": lambda: Buffered(8),
    "reads twice": lambda: Twice(8),
}
IMAGES = {"convolution": lambda: ConvNorm(4)}
TOKENS = {
    "attention": lambda: Attention(8),
    "attention dropout": lambda: Attention(8, dropout=0.3),
}


def compare(chain: rd.Chain, x: torch.Tensor, **side: torch.Tensor) -> None:
    """Run the chain and plain autograd from the same state; compare outputs, gradients, buffers."""
    plain = copy.deepcopy(chain)
    x_plain = x.clone().requires_grad_()
    x = x.clone().requires_grad_()
    state = torch.get_rng_state()
    true = run_plainly(plain, x_plain, **side)
    weigh(true).backward()
    after_plain = torch.get_rng_state()

    torch.set_rng_state(state)
    output = chain(x, **side)
    for y, y_plain in zip(_tuple(output), _tuple(true), strict=True):
        assert torch.allclose(y, y_plain, rtol=0, atol=1e-12)
    weigh(output).backward()

    assert worst_error(gradients(chain, x), gradients(plain, x_plain)) <= BOUND
    assert torch.equal(torch.get_rng_state(), after_plain)
    for (name, g), (_, t) in zip(chain.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(g, t, rtol=1e-12), name


def _tuple(y):
    return y if isinstance(y, tuple) else (y,)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", VECTORS)
def test_vectors(kind, depth, backward):
    chain = vector_chain(lambda _: VECTORS[kind](), depth, backward=backward).double()
    compare(chain, torch.randn(5, 6).double())


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", IMAGES)
def test_images(kind, depth, backward):
    couplings = [rd.Coupling(IMAGES[kind]()) for _ in range(depth)]
    units = [nn.Conv2d(3, 8, 1), rd.Split(dim=1), *couplings, rd.Fuse("concat", dim=1)]
    compare(rd.Chain(units, backward=backward).double(), torch.randn(3, 3, 5, 5).double())


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_with_a_mask(kind, depth, backward):
    couplings = [rd.Coupling(TOKENS[kind](), takes=("mask",)) for _ in range(depth)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse("add")], backward=backward).double()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    compare(chain, torch.randn(2, 4, 8).double(), mask=mask)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("streams", ["add", "mean", "first", "second"])
def test_every_way_to_fuse(streams, backward):
    couplings = [rd.Coupling(MLP(8)) for _ in range(3)]
    chain = rd.Chain([rd.Split(), *couplings, rd.Fuse(streams)], backward=backward).double()
    compare(chain, torch.randn(5, 16).double())


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_pair_comes_out_of_a_chain_that_ends_in_a_coupling(backward):
    couplings = [rd.Coupling(MLP(8)) for _ in range(3)]
    compare(
        rd.Chain([rd.Duplicate(), *couplings], backward=backward).double(),
        torch.randn(5, 8).double(),
    )


@pytest.mark.parametrize("backward", BACKWARDS)
def test_junctions_between_couplings(backward):
    """Rows of length 2, 1, 3 and 1 with widths 8 and 4, as in a down-sampling network."""
    units = [
        nn.Linear(6, 16),
        rd.Split(),
        rd.Coupling(MLP(8, dropout=0.5)),
        rd.Coupling(Twice(8)),
        rd.Fuse("concat"),
        nn.Linear(16, 8),
        nn.BatchNorm1d(8),
        rd.Split(),
        rd.Coupling(MLP(4)),
        rd.Fuse("mean"),
        nn.Dropout(0.3),
        rd.Duplicate(),
        *(rd.Coupling(Buffered(4)) for _ in range(3)),
        Swap(),
        rd.Coupling(MLP(4)),
        rd.Fuse("second"),
    ]
    compare(rd.Chain(units, backward=backward).double(), torch.randn(5, 6).double())


class Swap(nn.Module):
    """A junction from a pair to a pair."""

    def forward(self, streams):
        a, b = streams
        return b * 2, a


@given(st.data())
def test_any_depth_width_and_frozen_parameters(data):
    depth = data.draw(st.integers(1, 6), "depth")
    width = data.draw(st.integers(1, 9), "width")
    makers = st.sampled_from([MLP, Twice, Buffered, lambda w: MLP(w, dropout=0.5)])
    backward = data.draw(st.sampled_from(BACKWARDS[:2]), "backward")
    couplings = [rd.Coupling(data.draw(makers)(width)) for _ in range(depth)]
    chain = rd.Chain([nn.Linear(6, width), rd.Duplicate(), *couplings], backward=backward).double()
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(not data.draw(st.booleans(), f"frozen {name}"))
    compare(chain, torch.randn(5, 6).double())


@given(st.data())
def test_any_input_without_grad_and_any_frozen_units(data):
    """Nothing before the first trained unit requires grad; gradients flow from there on."""
    depth = data.draw(st.integers(1, 6), "depth")
    first = data.draw(st.integers(0, depth - 1), "first trained")
    backward = data.draw(st.sampled_from(BACKWARDS[:2]), "backward")
    chain = vector_chain(depth=depth, backward=backward).double()
    for unit in list(chain)[: 2 + first]:
        unit.requires_grad_(False)
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 6).double()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_parameter_that_f_does_not_use_has_no_gradient(backward):
    class Spare(MLP):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.spare = nn.Parameter(torch.zeros(3))

    chain = vector_chain(Spare, 3, backward=backward).double()
    compare(chain, torch.randn(5, 6).double())
    assert chain[3].f.spare.grad is None


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_constant_f_and_the_identity(backward):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    couplings = [rd.Coupling(f) for f in (nn.Identity(), Constant(), MLP(8), nn.Identity())]
    compare(
        rd.Chain([rd.Duplicate(), *couplings], backward=backward).double(),
        torch.randn(5, 8).double(),
    )
