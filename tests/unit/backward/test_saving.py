"""Saved operations: they are kept, not run again, and gradients are those of plain backprop."""

import copy
import gc
from collections import Counter
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, Attention, Marked
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd
from redivider._torch_private import TorchDispatchMode
from redivider.backward.saving import FUSED_ATTENTION

SAVES = ("save", "offload-save")


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def network(backward="save", **options):
    """Return couplings and junctions with attention, marks and dropout."""
    torch.manual_seed(0)
    functions = [Attention(8), Marked(8, 0.3), Attention(8, dropout=0.2), MLP(8, 0.3), Marked(8)]
    couplings = [rd.Coupling(f) for f in functions]
    units = [nn.Linear(6, 8), Attention(8), rd.Duplicate(), *couplings, rd.Fuse(), Marked(16)]
    return rd.Chain(units, backward=backward, **options).double()


def step(chain, forward, x, seed=1):
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    output = forward(x)
    weigh(output).backward()
    return output.detach(), gradients(chain, x), torch.get_rng_state()


def batch():
    return torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("backward", SAVES)
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_plain_backprop(backward, training):
    chain = network(backward).train(training)
    plain, x = copy.deepcopy(chain), batch()
    for _ in range(2):  # the first run of a module verifies it
        output, grads, state = step(chain, chain, x)
        true_output, true, true_state = step(plain, lambda x: run_plainly(plain, x), x)
        assert torch.allclose(output, true_output, rtol=0, atol=1e-12)
        assert worst_error(grads, true) <= 1e-12
        assert torch.equal(state, true_state)


def test_equal_to_store_to_the_last_bit_on_a_grid():
    chain = network(arithmetic="fixed").float()
    store = copy.deepcopy(chain)
    store.backward = "store"
    x = batch().float()
    _, grads, _ = step(chain, chain, x)
    _, true, _ = step(store, store, x)
    assert all(torch.equal(grads[name], true[name]) for name in true)


def test_saved_operations_are_not_run_again():
    """Attention and marked products run once, in the forward, and everything else twice."""
    chain, x = network(), batch().requires_grad_()
    with Operators() as forward:
        loss = weigh(chain(x))
    with Operators() as backward:
        loss.backward()
    attention = [forward.counts[kernel] for kernel in FUSED_ATTENTION]
    assert sum(attention) == 2  # with dropout inside, the CPU has no fused kernel
    assert not any(backward.counts[kernel] for kernel in FUSED_ATTENTION)
    assert forward.counts[torch.ops.aten.rand_like] == 3
    assert not backward.counts[torch.ops.aten.rand_like]
    chain.backward = "reverse-checkpoint"
    with Operators() as again:
        weigh(chain(x)).backward()
    assert again.counts[torch.ops.aten.rand_like] == 6
    # Both run the same operators but for the three marked products.
    products = forward.counts + backward.counts
    assert again.counts[torch.ops.aten.addmm] == products[torch.ops.aten.addmm] + 3


def test_a_coupling_holds_what_is_saved_and_a_junction_its_input_too():
    width, rows = 64, 128
    stream, hidden = 4 * rows * width, 4 * rows * 2 * width
    f = Marked(width).eval()
    streams = tuple(torch.randn(2, rows, width))

    def held(units, x):
        return rd.measure_memory(rd.Chain(units, backward="save"), x).held

    assert held([rd.Coupling(f)] * 3, streams) == 2 * stream + 3 * hidden
    # Of the input of the first junction, nobody else holds a copy.
    assert held([f] * 3, streams[0].clone().requires_grad_()) == 3 * (stream + hidden)


def test_attention_holds_its_output_and_logsumexp():
    f = Attention(64, heads=2)
    streams = tuple(torch.randn(2, 3, 32, 64))
    stream, logsumexp = streams[0].nbytes, 4 * 3 * 2 * 32
    held = rd.measure_memory(rd.Chain([rd.Coupling(f)] * 4, backward="save"), streams).held
    assert held == 2 * stream + 4 * (stream + logsumexp)


@pytest.mark.parametrize("backward", SAVES)
def test_two_forwards_before_one_backward_and_a_graph_that_is_retained(backward):
    chain = network(backward)
    plain = copy.deepcopy(chain)
    x, other = batch(), batch().flip(0)

    def train(forward):
        torch.manual_seed(2)
        losses = weigh(forward(x)), weigh(forward(other))
        losses[0].backward(retain_graph=True)
        (losses[1] + losses[0]).backward()

    train(chain)
    train(lambda x: run_plainly(plain, x))
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    loss = weigh(chain(x))
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time|released"):
        loss.backward()


def test_frozen_weights_and_gradients_of_a_few():
    chain = network()
    for unit in (0, 1, 3, 6):
        chain[unit].requires_grad_(False)
    plain, x = copy.deepcopy(chain), batch()
    _, grads, _ = step(chain, chain, x)
    _, true, _ = step(plain, lambda x: run_plainly(plain, x), x)
    assert worst_error(grads, true) <= 1e-12
    wanted = [param for param in chain[-1].parameters()]
    got = torch.autograd.grad(weigh(chain.eval()(x)), wanted)
    same = torch.autograd.grad(weigh(run_plainly(plain.eval(), x)), [*plain[-1].parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, same, strict=True))


def test_autocast():
    chain = network().float()
    store = copy.deepcopy(chain)
    store.backward = "checkpoint"
    x = batch().float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        loss = weigh(chain(x))
        torch.manual_seed(1)
        same = weigh(store(x))
    loss.backward()
    same.backward()
    assert worst_error(gradients(chain), gradients(store)) <= 1e-2


def test_nothing_is_held_after_the_backward():
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = rd.save(self.linear(x))
            seen.append(ref(y.untyped_storage()))
            return torch.tanh(y)

    chain = rd.Chain([rd.Coupling(Watched()), rd.Coupling(Watched())], backward="save")
    output = chain(tuple(torch.randn(2, 4, 3, 8)))
    assert [storage() is not None for storage in seen] == [True, True]  # whose tensors are gone
    loss = weigh(output)
    loss.backward()
    assert [storage() is not None for storage in seen[:2]] == [False, False]
    del output, loss
    gc.collect()
    assert not any(storage() for storage in seen)


def test_hooks_on_saved_tensors_see_them():
    chain, shapes = rd.Chain([rd.Coupling(Marked(8).eval())], backward="save"), []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = chain(tuple(torch.randn(2, 4, 8)))
    assert (4, 16) in shapes
    weigh(y).backward()


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return rd.save(self.linear(x)).mul_(2.0)


def test_writing_to_a_saved_tensor_is_refused():
    chain = rd.Chain([nn.Linear(8, 8), Writes()], backward="save")
    with pytest.raises(rd.UnitError, match=r"unit 1.*writes to a tensor that is saved"):
        chain(torch.randn(2, 8))


def test_marks_do_nothing_elsewhere():
    x = torch.randn(2, 8)
    assert rd.save(x) is x
    streams, hidden = (x, x.clone()), 4 * 2 * 16

    class Own(nn.Sequential):
        def forward(self, x):  # an argument, which no operation of f has made
            return super().forward(rd.save(x))

    def held(f, backward):
        return rd.measure_memory(rd.Chain([rd.Coupling(f)], backward=backward), streams).held

    assert held(Own(MLP(8)), "save") == held(MLP(8), "reverse")
    assert held(Marked(8).eval(), "reverse") == held(MLP(8), "reverse")
    assert held(Marked(8).eval(), "checkpoint") == held(MLP(8), "checkpoint")
    assert held(Marked(8).eval(), "save") == held(MLP(8), "reverse") + hidden


class Grouped(nn.Module):
    """Marks views of results, of an operation with several results, and of other dtype."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        first, second = rd.save(self.linear(x)).chunk(2, -1)
        y = rd.save(self.norm(torch.cat([second, first], -1)).unsqueeze(0))[0]
        y = torch.view_as_real(rd.save(torch.view_as_complex(y.reshape(-1, 2).sin()) * 1j))
        values, _ = y.reshape(*x.shape[:-1], -1).sort(-1)
        return self.down(rd.save(values.transpose(0, 1)).transpose(0, 1))


def test_marks_on_views_and_on_one_of_several_results():
    chain = rd.Chain([rd.Coupling(Grouped()) for _ in range(3)], backward="save").double()
    plain = copy.deepcopy(chain)
    a, b = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    weigh(chain((a, b))).backward()
    weigh(run_plainly(plain, (a, b))).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def test_a_part_that_is_compiled_is_refused():
    f = MLP(8)
    f[1].compile(backend="eager")
    with pytest.raises(rd.UnitError, match=r"unit 0.*chain\.compile"):
        rd.Chain([rd.Coupling(f)], backward="save")(tuple(torch.randn(2, 2, 8)))
    f = MLP(8)
    f.compile(backend="eager")
    with pytest.raises(rd.UnitError, match=r"chain\.compile"):
        rd.Chain([rd.Coupling(f)], backward="save")(tuple(torch.randn(2, 2, 8)))


def test_trim_needs_a_compiler():
    chain = rd.Chain([rd.Coupling(MLP(8))], backward="trim")
    with pytest.raises(rd.UnitError, match=r"not compiled.*chain\.compile"):
        chain(tuple(torch.randn(2, 2, 8)))
    with torch.no_grad():
        chain(tuple(torch.randn(2, 2, 8)))


def test_save_and_functional_softmax_attention():
    """Without a fused kernel, products of attention run again unless they are marked."""

    class Softmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return rd.save(F.softmax(q @ k.transpose(-1, -2), -1) @ v)

    chain = rd.Chain([rd.Coupling(Softmax()) for _ in range(2)], backward="save").double()
    plain = copy.deepcopy(chain)
    a, b = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    weigh(chain((a, b))).backward()
    weigh(run_plainly(plain, (a, b))).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


class Reader(nn.Module):
    """Junction whose last values depend on those of a product that no gradient needs."""

    def __init__(self, read):
        super().__init__()
        self.up, self.down, self.read = nn.Linear(8, 16), nn.Linear(16, 8), read
        self.last = None

    def forward(self, x):
        y = self.down(torch.tanh(rd.save(self.up(x))))
        self.last = y.detach()
        return y * self.read(y)


READERS = (
    lambda y: float(len((y.detach() > 0).nonzero())),
    lambda y: y.tolist()[0][0],
    lambda y: y.detach().sigmoid().bernoulli(),
    lambda y: torch.ones_like(y).to_sparse().to_dense(),
)


@pytest.mark.parametrize("read", READERS)
def test_what_follows_the_saved_tensors_runs_again(read):
    torch.manual_seed(0)
    chain = rd.Chain([nn.Linear(4, 8), Reader(read), Reader(read)]).double()
    store = copy.deepcopy(chain)
    store.backward, chain.backward = "store", "save"
    x = torch.randn(5, 4).double()
    for model in (chain, store):
        torch.manual_seed(1)
        weigh(model(x)).backward()
    assert worst_error(gradients(chain), gradients(store)) <= 1e-12
    assert torch.equal(chain[1].last, store[1].last)
