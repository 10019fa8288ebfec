"""The bijection itself, and the junctions around it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.networks import MLP, Attention
from torch import nn

import redivider as rd


def test_forward_is_the_equation_and_inverse_undoes_it():
    coupling = rd.Coupling(MLP(8)).double()
    a, b = torch.randn(2, 5, 8).double()
    c, same = coupling((a, b))
    assert torch.equal(c, b + coupling.f(a)) and same is a
    back_a, back_b = coupling.inverse((c, same))
    assert back_a is a
    assert torch.allclose(back_b, b, rtol=0, atol=1e-15)


def test_keywords_go_to_f_both_ways():
    coupling = rd.Coupling(Attention(8), takes=("mask",)).double()
    a, b = torch.randn(2, 2, 4, 8).double()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    masked, plain = coupling((a, b), mask=mask), coupling((a, b))
    assert not torch.equal(masked[0], plain[0])
    assert torch.allclose(coupling.inverse(masked, mask=mask)[1], b, rtol=0, atol=1e-15)


def test_a_coupling_alone_has_the_gradients_of_plain_autograd():
    coupling = rd.Coupling(MLP(8)).double()
    a, b = (torch.randn(5, 8).double().requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: coupling((a, b)), (a, b))


def test_two_couplings_are_a_block_of_two_functions():
    f, g = MLP(8).double(), MLP(8).double()
    x1, x2 = torch.randn(2, 5, 8).double()
    y1 = x1 + f(x2)
    y2 = x2 + g(y1)
    streams = rd.Coupling(g)(rd.Coupling(f)((x2, x1)))
    assert torch.equal(streams[0], y2) and torch.equal(streams[1], y1)


def test_duplicate_split_and_fuse():
    x = torch.randn(3, 4, 6)
    a, b = rd.Duplicate()(x)
    assert a is x and b is x
    for dim in (1, -1):
        assert torch.equal(rd.Fuse("concat", dim=dim)(rd.Split(dim=dim)(x)), x)
    a, b = rd.Split()(x)
    assert torch.equal(rd.Fuse("add")((a, b)), a + b)
    assert torch.equal(rd.Fuse("mean")((a, b)), (a + b) / 2)
    assert torch.equal(rd.Fuse("first")((a, b)), a)
    assert torch.equal(rd.Fuse("second")((a, b)), b)
    assert torch.equal(rd.Fuse()((a, b)), x)


def test_junctions_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match=r"'concat', 'add', .*got 'sum'"):
        rd.Fuse("sum")
    with pytest.raises(ValueError, match=r"unit 0, Split: dimension -1 of \(3, 5\) is odd"):
        rd.Chain([rd.Split()])(torch.randn(3, 5))
    with pytest.raises(ValueError, match="unit 1, Fuse: it takes a pair"):
        rd.Chain([nn.Identity(), rd.Fuse()])(torch.randn(3, 5))


@given(st.integers(0, 5), st.integers(1, 6))
def test_any_shape_even_an_empty_one(batch, width):
    for arithmetic in ("float", "fixed"):
        couplings = [rd.Coupling(MLP(width)) for _ in range(3)]
        chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], arithmetic=arithmetic)
        y = chain(torch.randn(batch, width))
        assert y.shape == (batch, 2 * width)
        y.sum().backward()


@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse"])
def test_hooks_in_a_chain_see_the_streams_alone(backward):
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(MLP(8)), rd.Fuse()], backward=backward)
    seen = []
    chain[1].register_forward_pre_hook(lambda module, args: seen.append(args))
    chain[1].register_forward_hook(lambda module, args, output: seen.append(args))
    chain(torch.randn(5, 8)).sum().backward()
    assert [len(args) for args in seen] == [1, 1]
    assert all(isinstance(stream, torch.Tensor) for (streams,) in seen for stream in streams)


def test_a_coupling_that_its_caller_compiled_runs_in_its_row():
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(MLP(8)), rd.Fuse()])
    x = torch.randn(5, 8)
    plain = torch.autograd.grad(chain(x).sum(), list(chain.parameters()))
    chain[1].compile(backend="eager")
    again = torch.autograd.grad(chain(x).sum(), list(chain.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
