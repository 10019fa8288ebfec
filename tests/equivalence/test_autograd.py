"""A chain behaves in autograd, and under the tools around it, as a plain module does."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.networks import MLP, Attention, Twice, vector_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd

REPLAYING = ("reverse", "checkpoint")

# torch's own tracer looks at the .grad of any input, which warns for one that is not a leaf.
TRACER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
BOUND = 1e-12


def pair(backward: str, make=MLP, depth: int = 4, **options) -> tuple[rd.Chain, rd.Chain]:
    """Return a chain, and a copy to be run by plain autograd."""
    chain = vector_chain(make, depth, backward=backward, **options).double()
    return chain, copy.deepcopy(chain)


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_frozen_stem_still_trains_the_chain(backward):
    chain, plain = pair(backward)
    x = torch.randn(5, 6).double()
    for model in (chain, plain):
        model[0].requires_grad_(False)
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert all(param.grad is not None for param in chain[2].parameters())
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", REPLAYING)
def test_autograd_grad_with_respect_to_parameters(backward):
    chain, plain = pair(backward)
    x = torch.randn(5, 6).double()
    for unit in (2, 3, 5):  # the first coupling, one in the middle, the last
        grads = torch.autograd.grad(weigh(chain(x)), list(chain[unit].parameters()))
        true = torch.autograd.grad(weigh(run_plainly(plain, x)), list(plain[unit].parameters()))
        for grad, expected in zip(grads, true, strict=True):
            assert torch.allclose(grad, expected, rtol=1e-10, atol=1e-13)
    assert all(param.grad is None for param in chain.parameters())


@pytest.mark.parametrize("backward", REPLAYING)
def test_hooks_on_parameters_fire_once_and_can_change_the_gradient(backward):
    chain, _ = pair(backward)
    fired: list[str] = []

    def double(grad, name):
        fired.append(name)
        return grad * 2

    for name, parameter in chain.named_parameters():
        parameter.register_hook(partial(double, name=name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"+{name}"))
    x = torch.randn(5, 6).double()
    weigh(chain(x)).backward()
    names = [name for name, _ in chain.named_parameters()]
    assert sorted(fired) == sorted([*names, *(f"+{name}" for name in names)])
    grads: dict[str, Any] = gradients(chain)
    halved = {name: grad / 2 for name, grad in grads.items()}
    plain = vector_chain(depth=4).double()
    plain.load_state_dict(chain.state_dict())
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(halved, gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("make", [MLP, lambda w: nn.ReLU()])
def test_a_second_backward_is_refused_without_retain_graph_and_works_with_it(make, backward):
    chain = vector_chain(make, 3, backward=backward).double()
    x = torch.randn(5, 6).double().requires_grad_()
    y = weigh(chain(x))
    y.backward(retain_graph=True)
    grads: dict[str, Any] = gradients(chain, x)
    once = {name: grad.clone() for name, grad in grads.items()}
    y.backward()
    twice: dict[str, Any] = gradients(chain, x)
    for name, grad in twice.items():
        assert torch.allclose(grad, 2 * once[name], rtol=1e-14), name
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_second_backward_through_couplings_alone(backward):
    """No plain module is there to refuse it first."""
    for make in (MLP, lambda _: nn.ReLU()):
        chain = rd.Chain([rd.Coupling(make(6)) for _ in range(3)], backward=backward)
        y = chain((torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)))[0].sum()
        y.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second"):
            y.backward()


@pytest.mark.parametrize("backward", REPLAYING)
def test_create_graph_is_refused_with_a_way_out(backward):
    chain, x = vector_chain(depth=2, backward=backward), torch.randn(5, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r'unit \d, .*create_graph.*backward="store"'):
        torch.autograd.grad(chain(x).sum(), x, create_graph=True)
    store = vector_chain(depth=2, backward="store")
    (grad,) = torch.autograd.grad(store(x).square().sum(), x, create_graph=True)
    grad.sum().backward()


@pytest.mark.parametrize("backward", REPLAYING)
def test_gradients_accumulate_over_micro_batches(backward):
    chain, plain = pair(backward)
    for x in torch.randn(3, 5, 6).double():
        weigh(chain(x)).backward()
        weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_partial_backward_does_not_disturb_a_later_one(backward):
    chain, plain = pair(backward)
    x = torch.randn(5, 6).double()
    y = weigh(chain(x))
    torch.autograd.grad(y, chain[4].f[1].weight, retain_graph=True)
    y.backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", REPLAYING)
def test_losses_on_intermediate_streams_seen_by_a_hook(backward):
    chain, plain = pair(backward)
    x, taps = torch.randn(5, 6).double(), []
    for model in (chain, plain):
        model[3].register_forward_hook(lambda _, __, out: taps.append(out[0]))
    loss = weigh(chain(x)) + taps.pop().square().sum()
    loss.backward()
    a, b = run_plainly(list(plain)[:4], x)
    (weigh(run_plainly(list(plain)[4:], (a, b))) + a.square().sum()).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


def test_a_loss_on_an_intermediate_stream_alone_says_what_to_do():
    chain, taps = vector_chain(depth=3), []
    chain[3].register_forward_hook(lambda _, __, out: taps.append(out[0]))
    chain(torch.randn(5, 6))
    with pytest.raises(RuntimeError, match=r'unit 3, Coupling\(MLP\).*backward="checkpoint"'):
        taps.pop().sum().backward()


class Conditioned(nn.Module):
    """Takes a tensor, a pair in a dictionary, a flag, and nothing."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, shift, rotary, flip=False, unused=None):
        assert unused is None
        cos, sin = rotary["pair"]
        y = torch.tanh(self.linear(x) * cos + x * sin + shift)
        return -y if flip else y


class Shifted(nn.Linear):
    """A junction that takes a keyword."""

    takes = ("shift",)

    def forward(self, x, shift):  # type: ignore[override]
        return super().forward(x) + shift


@pytest.mark.parametrize("backward", REPLAYING)
def test_keywords_reach_the_units_that_take_them_and_their_gradients_come_back(backward):
    names = ("shift", "rotary", "flip", "unused")
    units = [
        Shifted(6, 8),
        rd.Duplicate(),
        rd.Coupling(Conditioned(), takes=names),
        rd.Coupling(MLP(8)),
        rd.Coupling(Conditioned(), takes=names),
        rd.Fuse(),
    ]
    chain = rd.Chain(units, backward=backward).double()
    plain = copy.deepcopy(chain)
    x = torch.randn(5, 6).double()
    grads = []
    for run in (chain, lambda x, **side: run_plainly(plain, x, **side)):
        torch.manual_seed(4)
        shift, cos, sin = (torch.randn(8).double().requires_grad_() for _ in range(3))
        side = {"shift": shift, "rotary": {"pair": (cos, sin)}, "flip": True, "unused": None}
        weigh(run(x, **side)).backward()
        grads.append({"shift": shift.grad, "cos": cos.grad, "sin": sin.grad})
    assert chain.takes == names
    assert worst_error(*grads) <= BOUND
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
def test_a_keyword_may_have_any_name(backward):
    class Odd(nn.Module):
        def forward(self, x, name, exact, runner, streams, module, call):
            return x * (name + exact + runner + streams + module + call)

    names = ("name", "exact", "runner", "streams", "module", "call")
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(Odd(), takes=names)], backward=backward)
    x = torch.randn(3, requires_grad=True)
    c, _ = chain(x, **dict.fromkeys(names, 1.0))
    assert torch.allclose(c, 7 * x)


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
def test_a_keyword_that_nobody_takes_is_an_error(backward):
    chain = rd.Chain(
        [rd.Duplicate(), rd.Coupling(Attention(8), takes=("mask",))], backward=backward
    )
    with pytest.raises(TypeError, match=r"no unit takes the keyword 'msk', .*did you mean 'mask'"):
        chain(torch.randn(1, 2, 8), msk=None)


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_side_input_changed_in_between_raises(backward):
    couplings = [rd.Coupling(Attention(8), takes=("mask",)) for _ in range(2)]
    chain = rd.Chain([rd.Duplicate(), *couplings], backward=backward)
    mask = torch.zeros(3, 3)
    c, _ = chain(torch.randn(2, 3, 8), mask=mask)
    mask.fill_(-1.0)
    with pytest.raises(RuntimeError, match=r"unit 2, Coupling\(Attention\).*arguments"):
        c.sum().backward()


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_leaf_outside_of_f_is_refused_in_the_forward(backward):
    scale = nn.Parameter(torch.ones(8))
    derived = scale * 2

    class Reaches(nn.Module):
        def __init__(self, outside) -> None:
            super().__init__()
            self.linear, self.get = nn.Linear(8, 8), lambda: outside

        def forward(self, x):
            return self.linear(x) * self.get()

    for outside in (scale, derived):
        couplings = [rd.Coupling(MLP(8)), rd.Coupling(Reaches(outside))]
        chain = rd.Chain([rd.Duplicate(), *couplings], backward=backward)
        for _ in range(2):  # not only the first time
            with pytest.raises(ValueError, match=r"unit 2, Coupling\(Reaches\).*\(8,\).*keyword"):
                chain(torch.randn(5, 8))
    fine = rd.Chain([rd.Duplicate(), rd.Coupling(Reaches(scale.detach()))], backward=backward)
    weigh(fine(torch.randn(5, 8))).backward()


@pytest.mark.slow
@TRACER
@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("make", [MLP, Twice, lambda w: MLP(w, dropout=0.5)])
def test_compiled_f_agrees_with_eager(make, backward):
    """`aot_eager` traces and differentiates as the default does, and needs no compiler."""
    chain, _ = pair(backward, make)
    compiled = copy.deepcopy(chain)
    for unit in compiled:
        if isinstance(unit, rd.Coupling):
            unit.f.compile(backend="aot_eager")
    x = torch.randn(5, 6).double()
    for model in (chain, compiled):
        torch.manual_seed(1)
        weigh(model(x)).backward()
    assert worst_error(gradients(compiled), gradients(chain)) <= BOUND


@pytest.mark.slow
@TRACER
@pytest.mark.parametrize("backward", ["store", *REPLAYING])
def test_a_compiled_model_around_a_chain_agrees_with_eager(backward):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 6)
            self.chain = vector_chain(depth=3, backward=backward)

        def forward(self, x):
            return torch.tanh(self.chain(torch.relu(self.stem(x))))

    model = Model().double()
    x = torch.randn(5, 6).double()
    weigh(model(x)).backward()
    grads: dict[str, Any] = gradients(model)
    true = {name: grad.clone() for name, grad in grads.items()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    weigh(compiled(x)).backward()
    assert worst_error(gradients(model), true) <= BOUND
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), rtol=1e-14)


@pytest.mark.slow
@TRACER
@pytest.mark.parametrize("backward", ["store", *REPLAYING])
def test_plain_chains_are_traced_whole(backward):
    """Storing, and anything without grad mode, breaks no graph; even with a mask and autocast."""
    couplings = [rd.Coupling(Attention(8), takes=("mask",)) for _ in range(2)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward=backward)
    x, mask = torch.randn(2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(backward == "store"):
        assert torch.allclose(compiled(x, mask=mask), chain(x, mask=mask), atol=1e-6)


def test_evaluation_without_grad_is_plain_enough_to_export():
    chain = vector_chain(depth=3).eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        program = torch.export.export(chain, (x,))
        assert torch.allclose(program.module()(x), chain(x))


class Product(nn.Linear):
    """One matrix product, so that FLOPs are easy to count."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)


# A checkpoint of a single product need not run it again: its input is all that the backward needs.
@pytest.mark.parametrize("backward, units", [("store", 3), ("checkpoint", 3), ("reverse", 4)])
def test_the_flop_counter_sees_three_or_four_units_of_work(backward, units):
    depth = 5
    chain = rd.Chain([rd.Coupling(Product(8)) for _ in range(depth)], backward=backward)
    streams = tuple(torch.randn(4, 8, requires_grad=True) for _ in range(2))
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            weigh(chain(streams)).backward()
        assert counter.get_total_flops() == units * depth * (2 * 4 * 8 * 8)


@pytest.mark.parametrize("backward", REPLAYING)
def test_a_saved_tensor_hook_sees_no_more_than_the_last_streams(backward):
    """Tools that pack what autograd saves, such as `save_on_cpu`, work on a chain too."""
    chain, plain = pair(backward)
    x = torch.randn(5, 6).double()
    with torch.autograd.graph.save_on_cpu():
        y = weigh(chain(x))
    y.backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= BOUND
