"""A chain as a container: indices, slices, keys, copies, units that are chains."""

import copy
import io
from typing import Any

import pytest
import torch
from support.networks import MLP, vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd


def test_length_indices_slices_and_iteration_are_those_of_a_sequential():
    units = [nn.Linear(6, 8), rd.Duplicate(), rd.Coupling(MLP(8)), rd.Coupling(MLP(8))]
    chain = rd.Chain(units, backward="checkpoint", arithmetic="fixed", check_every=7)
    assert len(chain) == 4
    assert list(chain) == list(chain.units()) == units
    assert chain[0] is units[0] and chain[-1] is units[3]
    tail = chain[2:]
    assert isinstance(tail, rd.Chain) and list(tail) == units[2:]
    assert (tail.backward, tail.arithmetic, tail.check_every) == ("checkpoint", chain.arithmetic, 7)
    assert list(tail.state_dict()) == [key for key in chain.state_dict() if key[0] in "23"]
    with pytest.raises(IndexError):
        chain[4]


def test_units_with_names_keep_them_in_keys_slices_and_errors():
    named = {"stem": nn.Linear(6, 8), "both": rd.Duplicate(), "norm": rd.Coupling(MLP(8))}
    chain = rd.Chain({**named, "wrong": rd.Coupling(nn.Linear(8, 4)), "end": rd.Fuse()})
    assert list(chain) == [*named.values(), chain[3], chain[4]]
    assert "norm.f.1.weight" in chain.state_dict()
    assert [key for key, _ in chain[1:3].named_children()] == ["both", "norm"]
    with pytest.raises(ValueError, match=r"unit 3 \(wrong\), Coupling\(Linear\): f must keep"):
        chain(torch.randn(5, 6))


@pytest.mark.parametrize("name", ["", "a.b", "backward", "arithmetic", "forward"])
def test_names_that_a_unit_cannot_have(name):
    with pytest.raises(ValueError, match=f"a unit cannot be called {name!r}"):
        rd.Chain({name: nn.Identity()})


def test_names_are_kept_apart_and_a_module_dict_has_names():
    with pytest.raises(ValueError, match="two units are called '1'"):
        rd.Chain({1: nn.Identity(), "1": nn.Identity()})  # type: ignore[arg-type]
    units: Any = nn.ModuleDict({"stem": nn.Linear(2, 2), "end": nn.Linear(2, 2)})
    chain = rd.Chain(units)
    assert next(iter(chain.state_dict())) == "stem.weight"


def test_a_unit_may_occur_twice():
    shared = rd.Coupling(MLP(8).double())
    chain = rd.Chain([rd.Duplicate(), shared, shared, rd.Fuse()])
    x = torch.randn(5, 8).double()
    assert len(chain) == 4 and len(chain[1:3]) == 2
    plain = copy.deepcopy(chain)
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_state_dict_has_the_keys_of_a_sequential():
    chain = vector_chain(depth=2)
    plain = nn.Sequential(*(copy.deepcopy(unit) for unit in chain))
    assert list(chain.state_dict()) == list(plain.state_dict())
    assert "2.f.1.weight" in chain.state_dict()
    weigh(chain(torch.randn(5, 6))).backward()
    plain.load_state_dict(chain.state_dict())
    assert list(chain.state_dict()) == list(plain.state_dict()), "a step adds no state"


@pytest.mark.parametrize("backward", ["reverse", "checkpoint"])
def test_copies_train_apart(backward):
    chain = vector_chain(lambda w: MLP(w, dropout=0.5), backward=backward).double()
    x = torch.randn(5, 6).double()
    weigh(chain(x)).backward()  # a chain that has been used can be copied
    other = copy.deepcopy(chain)
    stored = io.BytesIO()
    torch.save(chain, stored)
    stored.seek(0)
    third = torch.load(stored, weights_only=False)
    plain = copy.deepcopy(chain)
    for model in (other, third, plain):
        model.zero_grad()
        torch.manual_seed(5)
        weigh(run_plainly(model, x) if model is plain else model(x)).backward()
    for model in (other, third):
        assert worst_error(gradients(model), gradients(plain)) <= 1e-12
        assert model[2].f[1].weight is not chain[2].f[1].weight


@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse", "reverse-checkpoint"])
def test_chains_within_chains(backward):
    inner = rd.Chain([rd.Coupling(MLP(8)), rd.Coupling(MLP(8))], backward=backward)
    chain = rd.Chain([rd.Duplicate(), inner, rd.Coupling(MLP(8)), rd.Fuse()], backward=backward)
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 8)
    chain.double()(x.double()).sum().backward()
    a, b = run_plainly(plain.double()[1], (x.double(), x.double()))
    run_plainly(list(plain)[2:], (a, b)).sum().backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    broken = rd.Chain([rd.Duplicate(), rd.Chain([rd.Coupling(nn.Linear(8, 4))])])
    with pytest.raises(ValueError, match=r"unit 1, Chain: unit 0, Coupling\(Linear\): f must keep"):
        broken(x)


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["store", "checkpoint", "reverse", "reverse-checkpoint"])
def test_training_lowers_the_loss_as_plain_training_does(backward):
    torch.manual_seed(0)
    chain = vector_chain(lambda w: MLP(w, dropout=0.1), 4, backward=backward).double()
    plain = copy.deepcopy(chain)
    x, target = torch.randn(64, 6).double(), torch.randint(3, (64,))
    curves = []
    for model, run in ((chain, chain), (plain, lambda x: run_plainly(plain, x))):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        curve = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x), target)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)
    assert curves[0][-1] < 0.6 * curves[0][0]


def test_mixed_inputs_integers_through_an_embedding():
    units = [nn.Embedding(11, 8), rd.Duplicate(), rd.Coupling(MLP(8)), rd.Fuse("mean")]
    for backward in ("store", "checkpoint", "reverse"):
        chain = rd.Chain(units, backward=backward)
        chain(torch.randint(11, (4, 5))).sum().backward()
        assert chain[0].weight.grad is not None


def test_its_text_says_how_it_runs():
    text = repr(vector_chain(depth=1, arithmetic="fixed"))
    assert "backward='reverse', arithmetic=Fixed(bits=20)" in text
    assert "(2): Coupling(" in text and "Fuse('concat', dim=-1)" in text
    assert "takes=('mask',)" in repr(rd.Coupling(MLP(8), takes=["mask"]))


def test_the_inverse_of_couplings_is_their_input():
    torch.manual_seed(0)
    couplings = [rd.Coupling(Masked(MLP(4)), takes=("mask",)) for _ in range(6)]
    chain = rd.Chain(couplings).double()
    a, b = torch.randn(2, 3, 4, dtype=torch.float64)
    mask = torch.rand(3, 4, dtype=torch.float64)
    with torch.no_grad():
        back = chain.inverse(chain((a, b), mask=mask), mask=mask)
    assert all(torch.allclose(x, y, rtol=0, atol=1e-13) for x, y in zip(back, (a, b), strict=True))
    with pytest.raises(TypeError, match="no unit takes the keyword 'scale'"):
        chain.inverse((a, b), scale=mask)
    whole = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()])
    with pytest.raises(rd.UnitError, match="unit 7, Fuse: it has no inverse; take the couplings"):
        whole.inverse(a)


class Masked(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x, mask):
        return self.f(x) * mask
