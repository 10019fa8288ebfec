"""Saved operations on a GPU: eager, compiled, captured, by every fused kernel of attention."""

import copy

import pytest
import torch
from support.networks import Attention, Marked
from support.oracle import gradients, weigh, worst_error
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import redivider as rd

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler's and the profiler's own
]

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
WIDTH, TOKENS, BATCH = 128, 64, 4


def network(dropout=0.1, depth=2):
    torch.manual_seed(0)
    functions = [Attention(WIDTH, 2, dropout), Marked(WIDTH, dropout)]
    couplings = [rd.Coupling(copy.deepcopy(f)) for _ in range(depth) for f in functions]
    units = [nn.Linear(32, WIDTH), rd.Duplicate(), *couplings, rd.Fuse(), Marked(2 * WIDTH)]
    return rd.Chain(units, backward="store").cuda()


def batch():
    return torch.randn(BATCH, TOKENS, 32, device="cuda")


def step(chain, x, backward, autocast=True):
    chain.backward = backward
    chain.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = weigh(chain(x))
    loss.backward()
    return copy.deepcopy(gradients(chain))


@pytest.mark.parametrize("backward", ["save", "offload-save"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_eager(kernel, backward):
    """With dropout inside of attention, later dropout must draw the same numbers again."""
    chain, x = network(), batch()
    with sdpa_kernel(kernel):
        true = step(chain, x, "store")
        assert worst_error(step(chain, x, backward), true) <= 2e-2
        assert worst_error(step(chain, x, "checkpoint"), true) <= 2e-2


def test_float64():
    chain, x = network().double(), batch().double()
    true = step(chain, x, "store", autocast=False)
    assert worst_error(step(chain, x, "save", autocast=False), true) <= 1e-12


def test_to_the_last_bit_on_a_grid():
    chain, x = network(), batch()
    chain.arithmetic = "fixed"
    true = step(chain, x, "store")
    got = step(chain, x, "save")
    assert all(torch.equal(got[name], true[name]) for name in true)


def run_operators(chain, x, backward):
    """Return the names of the kernels of attention that a backward runs."""
    chain.backward = backward
    with torch.autocast("cuda", torch.bfloat16):
        loss = weigh(chain(x))
    with torch.profiler.profile() as profile:
        loss.backward()
    return [event.key for event in profile.key_averages() if "_attention" in event.key]


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_is_not_run_again(compiled):
    chain, x = network(dropout=0.0), batch()
    if compiled:
        chain.compile(dynamic=False)
    for backward in ("save", "reverse"):
        step(chain, x, backward)
        names = run_operators(chain, x, backward)
        forward = [name for name in names if name.endswith("_attention_forward")]  # the kernel
        assert bool(forward) == (backward == "reverse"), names


@pytest.mark.parametrize("backward", ["save", "trim"])
def test_compiled(backward):
    chain, x = network(dropout=0.0), batch()
    chain.eval()  # compiled variants draw other random numbers
    chain.compile(dynamic=False)
    true = step(chain, x, "store")
    assert worst_error(step(chain, x, backward), true) <= 2e-2


@pytest.mark.parametrize("backward", ["save", "trim"])
def test_compiled_dropout(backward):
    """Inductor compiles marks without a copy, and recomputes with the same dropout masks."""
    chain = rd.Chain([Marked(8, 0.3)], backward=backward).to("cuda", torch.float64)
    chain.compile(dynamic=False)
    x, direction = torch.randn(2, 6, 8, device="cuda", dtype=torch.float64)
    x.requires_grad_()

    def run(shift):
        torch.manual_seed(1)  # of the masks
        return weigh(chain(x + shift * direction))

    run(0.0).backward()
    with torch.profiler.profile() as profile:
        slope = (run(1e-5) - run(-1e-5)) / 2e-5
    assert torch.allclose((x.grad * direction).sum(), slope, rtol=1e-7)
    names = {event.key for event in profile.key_averages()}
    assert "CompiledFunction" in names and "redivider::save" not in names


@pytest.mark.parametrize("compiled, backward", [(False, "save"), (True, "save"), (True, "trim")])
def test_captured(compiled, backward):
    chain, x = network(), batch()
    if compiled:
        chain.compile(dynamic=False)
    chain.backward = backward

    def train(x):
        chain.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16):
            loss = weigh(chain(x))
        loss.backward()
        return loss.detach()

    torch.manual_seed(1)
    captured = rd.capture(train, (x,))
    torch.manual_seed(1)
    captured(x)
    got = copy.deepcopy(gradients(chain))
    torch.manual_seed(1)
    train(x)
    assert worst_error(got, gradients(chain)) <= 2e-2


def test_capture_refuses_offload_save():
    chain, x = network(), batch()
    chain.backward = "offload-save"
    with pytest.raises(RuntimeError, match="host"):
        rd.capture(lambda x: weigh(chain(x)).backward(), (x,))


def held(chain, x, backward):
    """Return the bytes that the allocator holds between forward and backward."""
    step(chain, x, backward)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = weigh(chain(x))
    after = torch.cuda.memory_allocated()
    loss.backward()
    return after - before


def test_bytes():
    """Couplings hold attention's output and logsumexp, and the marked product."""
    x = batch()
    small, large = (network(dropout=0.0, depth=depth).eval() for depth in (2, 6))
    grown = {b: held(large, x, b) - held(small, x, b) for b in ("store", "reverse", "save")}
    values = BATCH * TOKENS * WIDTH
    saved = 4 * (2 * values + 4 * BATCH * 2 * TOKENS + 2 * 2 * values)
    assert grown["reverse"] < saved / 10
    assert saved <= grown["save"] <= 1.1 * saved
    assert grown["save"] < grown["store"] / 2


@pytest.mark.parametrize("compiled", [False, True])
def test_plans_offer_it(compiled):
    from redivider.budget.measure import measure

    chain, x = network(dropout=0.0), batch()
    if compiled:
        chain.compile(dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        problem = measure(chain, x, {}, lambda y: y.float().square().mean())
    names = {option.choice for option in problem.units[2]}
    assert {"save", "trim" if compiled else "offload-save"} <= names
    costs = {option.choice: option.cost for option in problem.units[2]}
    assert costs["store"] == 0.0
