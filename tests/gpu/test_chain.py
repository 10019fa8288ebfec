"""The core on a GPU: the same numbers, no waiting for the device, flat memory."""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from support.networks import MLP, Attention, Buffered, ConvNorm, Twice, token_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

REPLAYING = ("reverse", "checkpoint")


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("depth", [1, 2, 3, 9, 48])
def test_gradients_in_float64(depth, backward):
    chain = token_chain(depth, backward=backward).double()
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 10, 6, device="cuda").double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, y)).backward()
    assert worst_error(gradients(chain, x), gradients(plain, y)) <= 1e-12


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("make", [ConvNorm, lambda w: nn.Conv2d(w, w, 3, padding=1)])
def test_images(make, backward):
    couplings = [rd.Coupling(make(8)) for _ in range(5)]
    chain = rd.Chain([rd.Split(dim=1), *couplings, rd.Fuse(dim=1)], backward=backward)
    chain = chain.cuda().double()
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 16, 9, 9, device="cuda").double()
    weigh(chain(x)).backward()
    weigh(run_plainly(plain, x)).backward()
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-12)


@pytest.mark.parametrize("backward", REPLAYING)
def test_dropout_is_replayed_and_the_random_state_is_the_plain_models(backward):
    chain = token_chain(dropout=0.5, backward=backward).double()
    plain = copy.deepcopy(chain)
    x = torch.randn(4, 10, 6, device="cuda").double()
    states = []
    for run in (chain, lambda x: run_plainly(plain, x)):
        torch.manual_seed(3)
        loss = weigh(run(x))
        torch.rand(5, device="cuda")
        loss.backward()
        states.append((torch.cuda.get_rng_state(), torch.get_rng_state()))
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_a_step_never_waits_for_the_device(arithmetic, backward):
    chain = token_chain(dropout=0.1, backward=backward, arithmetic=arithmetic, check_every=1)
    optimizer = torch.optim.AdamW(chain.parameters(), fused=True)
    x = torch.randn(4, 10, 6, device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step else mode)  # the first one learns about f
        try:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = chain(x).float().square().mean()
            loss.backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("make", [MLP, Twice, Attention, Buffered])
def test_the_grid_is_exact_under_bf16(make):
    torch.manual_seed(0)
    couplings = [rd.Coupling(make(32)) for _ in range(128)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], arithmetic="fixed").cuda()
    x = torch.randn(4, 10, 32, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert rd.check_reversible(chain, x).worst == 0.0
        assert rd.check_gradients(chain, x).worst == 0.0


class Grows(nn.Module):
    def __init__(self, factor: float = 3.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.gain


@pytest.mark.parametrize("backward", ["store", *REPLAYING])
@pytest.mark.parametrize("factor", [3.0, torch.nan])
def test_a_fault_poisons_the_output_and_is_raised_later_with_its_unit(factor, backward):
    couplings: list[Any] = [rd.Coupling(Grows(1.0)), rd.Coupling(Grows(factor))]
    couplings += [rd.Coupling(Grows()) for _ in range(8)]
    chain = rd.Chain([rd.Duplicate(), *couplings], arithmetic="fixed", backward=backward).cuda()
    c, _ = chain(torch.ones(64, device="cuda"))
    assert c.isnan().all()
    c.sum().backward()
    assert chain[1].f.gain.grad.isnan()
    torch.cuda.synchronize()
    index = 2 if factor != 3.0 else "[4-9]"
    with pytest.raises(OverflowError, match=rf"unit {index}, Coupling\(Grows\)"):
        chain(torch.ones(64, device="cuda"))
    with torch.no_grad():
        for coupling in couplings:
            coupling.f.gain.fill_(0.1)
    torch.cuda.synchronize()
    c, _ = chain(torch.ones(64, device="cuda"))  # the fault was reported once
    assert torch.isfinite(c).all()


def test_drift_is_told_by_a_later_step():
    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return 100 * torch.sin(self.linear(x))

    chain = rd.Chain([rd.Duplicate(), *(rd.Coupling(Loud()) for _ in range(4)), rd.Fuse()])
    chain = chain.cuda().bfloat16()
    x = torch.randn(8, 16, device="cuda").bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain(x).sum().backward()
    torch.cuda.synchronize()
    with pytest.warns(rd.DriftWarning, match="unit 1, "):
        chain(x)


@pytest.mark.parametrize("backward", REPLAYING)
def test_training_on_a_side_stream(backward):
    """Dropping the wait for the producing CUDA stream would race here."""
    chain = token_chain(backward=backward).double()
    plain = copy.deepcopy(chain)
    side = torch.cuda.Stream()
    x = torch.randn(64, 10, 6, device="cuda").double()
    weigh(run_plainly(plain, x)).backward()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weigh(chain(x)).backward()
    torch.cuda.current_stream().wait_stream(side)
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12


def peaks(backward: str, depth: int) -> tuple[int, int]:
    """Return bytes held after the forward and at the peak, without parameters and gradients."""
    chain = rd.Chain(
        [rd.Duplicate(), *(rd.Coupling(MLP(64)) for _ in range(depth)), rd.Fuse()],
        backward=backward,
    ).cuda()
    x = torch.randn(2**15, 64, device="cuda")  # a stream of 8 MiB
    chain(x).sum().backward()  # gradients are there from now on, and libraries have their workspace
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = chain(x)
    held = torch.cuda.memory_allocated() - before
    y.sum().backward()
    return held, torch.cuda.max_memory_allocated() - before


def test_memory_is_flat_in_depth():
    (held_8, peak_8), (held_64, peak_64) = peaks("reverse", 8), peaks("reverse", 64)
    stream = 2**15 * 64 * 4
    assert abs(held_64 - held_8) < stream
    assert abs(peak_64 - peak_8) < stream
    assert held_8 <= 5 * stream
    assert peaks("store", 16)[0] - peaks("store", 8)[0] > 8 * stream


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
def test_f_compiled_by_the_default_compiler(arithmetic):
    chain = token_chain(6, dropout=0.0, arithmetic=arithmetic)
    compiled = copy.deepcopy(chain)
    for unit in compiled:
        if isinstance(unit, rd.Coupling):
            unit.f.compile()
    x = torch.randn(4, 10, 6, device="cuda")
    for model in (chain, compiled):
        for _ in range(2):
            model.zero_grad()
            weigh(model(x)).backward()
    assert worst_error(gradients(compiled), gradients(chain)) <= 1e-3
    assert rd.check_reversible(compiled, x).worst <= (0.0 if arithmetic == "fixed" else 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_dropout_of_a_compiled_f_is_replayed():
    chain = token_chain(6, dropout=0.5)
    for unit in chain:
        if isinstance(unit, rd.Coupling):
            unit.f.compile()
    x = torch.randn(16, 10, 6, device="cuda")
    for _ in range(2):  # the first forward builds a graph to look at f, the second one does not
        assert rd.check_reversible(chain, x).worst <= 1e-4


@pytest.mark.parametrize("backward", REPLAYING)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_fused_steps_between_forward_and_backward_raise(kind, backward):
    couplings = [rd.Coupling(MLP(6)) for _ in range(3)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse()], backward=backward).cuda()
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    optimizer = make(chain.parameters(), lr=0.1, fused=True)
    x = torch.randn(5, 6, device="cuda")
    chain(x).sum().backward()
    y = chain(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"unit \d, .*weights"):
        y.sum().backward()
