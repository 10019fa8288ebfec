"""The checkers find what is wrong, pass what is right, and leave everything as it was."""

import random
import warnings
from functools import partial

import pytest
import torch
from support.networks import MLP, Attention, Buffered, ConvNorm, vector_chain
from torch import nn

import redivider as rd

ALL = ("store", "checkpoint", "reverse", "reverse-checkpoint")


@pytest.mark.parametrize("backward", ALL)
def test_check_gradients_passes_what_is_right(backward):
    chain = vector_chain(lambda w: MLP(w, dropout=0.5), 5, backward=backward).double()
    x = torch.randn(5, 6).double().requires_grad_()
    report = rd.check_gradients(chain, x)
    assert set(report.errors) == {"input 0", *(name for name, _ in chain.named_parameters())}
    assert report.each is report.errors  # its former name
    assert report.worst <= 1e-12
    assert (report.worst == 0) == (backward == "store")
    assert chain.backward == backward


def test_under_autocast_gradients_may_differ_as_its_precision_does():
    couplings = [rd.Coupling(MLP(16)) for _ in range(8)]
    ends = [rd.Fuse("concat"), nn.LayerNorm(32), nn.Linear(32, 3)]
    chain = rd.Chain([rd.Duplicate(), *couplings, *ends], backward="reverse")
    x = 1000 + torch.randn(32, 16)  # so that restored inputs often round to other bf16 numbers
    with torch.autocast("cpu", torch.bfloat16):
        report = rd.check_gradients(chain, x)
        assert 1e-5 < report.worst <= 5e-2
        with pytest.raises(ValueError, match=r"more than 1.0e-05"):
            rd.check_gradients(chain, x, tolerance=1e-5)


def test_a_cpu_without_bf16_instructions_is_no_error():
    """Torch then warns once, in its own words, and takes another kernel."""
    warnings.warn("mkldnn_matmul bf16 path needs a cpu with bf16 support", stacklevel=1)


def test_check_gradients_takes_keywords_and_pairs():
    couplings = [rd.Coupling(Attention(8), takes=("mask",)) for _ in range(3)]
    chain = rd.Chain(couplings).double()
    streams = tuple(torch.randn(2, 4, 8).double().requires_grad_() for _ in range(2))
    mask = torch.zeros(4, 4).double().requires_grad_()
    report = rd.check_gradients(chain, streams, mask=mask)
    assert {"input 0", "input 1", "input 2"} < set(report.errors)


def test_keywords_may_be_made_of_the_weights():
    layers = [MLP(8) for _ in range(2)]

    class Shifted(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, shift):
            return self.layer(x) + shift

    chain = rd.Chain([rd.Coupling(Shifted(layer), takes=("shift",)) for layer in layers]).double()
    streams = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    shift = layers[0].get_parameter("1.weight").square().sum(0)
    rd.check_gradients(chain, streams, shift=shift)
    rd.plan(chain, streams, memory="1MiB", shift=shift)
    shift.sum().backward()  # its graph is still there


class Moody(nn.Module):
    """Layer that is another function at every call."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) * random.random()


def test_an_f_that_is_not_deterministic_is_found():
    random.seed(0)  # two draws may be alike
    chain = vector_chain(Moody, 3).double()
    x = torch.randn(5, 6).double()
    with pytest.raises(ValueError, match=r"unit 4, Coupling\(Moody\).*is f deterministic"):
        rd.check_reversible(chain, x)
    with pytest.raises(ValueError, match="its gradient differs from plain backprop's by"):
        rd.check_gradients(chain, x)


def test_chains_inside_of_a_chain_are_stored_too():
    """Otherwise the reference gradients would themselves be computed by reversing."""
    calls = []
    inner = rd.Chain([rd.Split(), rd.Coupling(MLP(4)), rd.Fuse()])
    inner[1].f.register_forward_hook(lambda *_: calls.append(inner.backward))
    outer = rd.Chain([nn.Linear(3, 8), inner, nn.Linear(8, 2)])
    rd.check_gradients(outer, torch.randn(5, 3))
    assert calls == ["reverse", "reverse", "store"]
    assert inner.backward == outer.backward == "reverse"


def test_checking_leaves_everything_as_it_was():
    couplings = [rd.Coupling(f) for f in (ConvNorm(4), ConvNorm(4))]
    units = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5), rd.Split(dim=1), *couplings]
    images, vectors = torch.randn(4, 3, 5, 5), torch.randn(5, 6)
    for chain, x in ((rd.Chain(units), images), (vector_chain(Buffered), vectors)):
        before = {name: value.clone() for name, value in chain.state_dict().items()}
        random_state, training = torch.get_rng_state(), [m.training for m in chain.modules()]
        rd.check_reversible(chain, x)
        rd.check_gradients(chain, x)
        rd.measure_memory(chain, x)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert [m.training for m in chain.modules()] == training
        assert all(param.grad is None for param in chain.parameters())
        for name, value in chain.state_dict().items():
            assert torch.equal(value, before[name]), name


def wide_chain(depth: int, backward: str) -> rd.Chain:
    couplings = [rd.Coupling(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid())) for _ in range(depth)]
    return rd.Chain([rd.Duplicate(), *couplings, rd.Fuse("add")], backward=backward)


STREAM = 4 * 1024 * 32


def test_measured_memory_is_what_the_methods_keep():
    x = torch.randn(1024, 32)
    for depth in (4, 9):
        held = {
            backward: rd.measure_memory(wide_chain(depth, backward), x).held for backward in ALL
        }
        # Output; then the last two streams; all first streams; or both of f's activations.
        assert held["reverse"] == 3 * STREAM
        assert held["checkpoint"] == pytest.approx((depth + 2) * STREAM, abs=STREAM)
        assert held["store"] == pytest.approx(2 * depth * STREAM, abs=2 * STREAM)


def test_measured_peak_is_flat_too():
    x = torch.randn(1024, 32)
    peaks = [rd.measure_memory(wide_chain(depth, "reverse"), x).peak for depth in (4, 32)]
    weights = 28 * (32 * 32 + 32) * 4  # of their gradients
    assert peaks[1] - peaks[0] <= weights + STREAM // 8


def test_the_peak_without_gradients_of_weights_is_flat():
    x = torch.randn(1024, 32)
    memories = [rd.measure_memory(wide_chain(depth, "reverse"), x) for depth in (4, 32)]
    assert memories[0].peak_without_gradients == memories[1].peak_without_gradients
    weights = 32 * (32 * 32 + 32) * 4
    assert memories[1].held < memories[1].peak_without_gradients < memories[1].peak
    assert memories[1].peak <= memories[1].peak_without_gradients + weights


def test_kinds_of_backward_side_by_side():
    chain, x = wide_chain(9, "reverse-checkpoint"), torch.randn(1024, 32)
    comparison = rd.compare_memory(chain, x)
    assert comparison.gradients == 9 * (32 * 32 + 32) * 4
    assert list(comparison.by_backward) == ["store", "checkpoint", "reverse"]
    for backward, memory in comparison.by_backward.items():
        assert memory == rd.measure_memory(wide_chain(9, backward), x)
    assert chain.backward == "reverse-checkpoint"
    table = str(comparison).splitlines()
    assert "MiB" in table[1]  # from 1,024 KiB on
    assert table[3].split()[:3] == ["reverse", f"{3 * STREAM / 2**10:.1f}", "KiB"]
    assert table[-1] == "and 37.1 KiB for the gradients of weights"


def test_chains_inside_of_a_module_are_compared():
    chains = wide_chain(6, "store"), wide_chain(6, "checkpoint")
    module = nn.Sequential(nn.Linear(8, 32), *chains)
    memories = rd.compare_memory(module, torch.randn(64, 8), backward=["store", "reverse"])
    assert memories.by_backward["reverse"].held < memories.by_backward["store"].held / 2
    assert [chain.backward for chain in chains] == ["store", "checkpoint"]
    with pytest.raises(ValueError, match="'revers'"):
        rd.compare_memory(module, torch.randn(64, 8), backward=["revers"])
    assert [chain.backward for chain in chains] == ["store", "checkpoint"]
    with pytest.raises(TypeError, match="a module with chains, got Linear"):
        rd.compare_memory(nn.Linear(2, 2), torch.randn(3, 2))
    with pytest.raises(TypeError, match=r"write backward=\['store'\]"):
        rd.compare_memory(module, torch.randn(64, 8), backward="store")
    with pytest.raises(TypeError, match="takes a module or a pipeline, got list"):
        rd.measure_memory([module], torch.randn(64, 8))  # type: ignore[call-overload]


def test_check_memory_passes_reversal_and_refuses_storing():
    x = torch.randn(256, 32)
    memory = rd.check_memory(lambda depth: wide_chain(depth, "reverse"), x, depths=(3, 9, 27))
    assert list(memory) == [3, 9, 27]
    assert "KiB" in str(memory[3])
    for backward in ("store", "checkpoint"):
        with pytest.raises(ValueError, match="grows with depth: depth 8: held"):
            rd.check_memory(partial(wide_chain, backward=backward), x)
    with pytest.raises(TypeError, match="a function from a depth to a chain"):
        rd.check_memory(wide_chain(2, "reverse"), x)
    for check in (rd.check_reversible, rd.check_gradients):
        with pytest.raises(TypeError, match="take a Chain, got Linear"):
            check(nn.Linear(2, 2), x)  # type: ignore[arg-type]


def test_a_model_without_memory_can_be_measured_and_cut():
    model = rd.create_model("revnet18", image_size=32, device="meta")
    x = torch.empty(2, 3, 32, 32, device="meta")
    assert rd.measure_memory(model, x).held > 0
    assert sum(rd.balance(model, 4, example=x)) == len(model)


class DictOutput(nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x), "aux": None, "name": "told"}


def test_outputs_may_hold_more_than_tensors():
    chain = rd.Chain([*vector_chain(MLP, 3), DictOutput(3, 2)]).double()
    x = torch.randn(5, 6).double()
    assert 0 < rd.check_gradients(chain, x).worst < 1e-12
    assert rd.measure_memory(chain, x).held > 0


def test_sparse_gradients_are_measured():
    def embedding(sparse):
        stem = nn.Embedding(1000, 6, sparse=sparse)
        return rd.Chain([stem, *vector_chain(MLP, 2)])

    x = torch.arange(5)
    sparse, dense = (rd.measure_memory(embedding(is_sparse), x) for is_sparse in (True, False))
    assert sparse.held == dense.held
    assert 0 < sparse.peak < dense.peak
    assert rd.check_gradients(embedding(sparse=True), x).worst < 1e-5


def test_checkers_compute_gradients_also_where_the_caller_wants_none():
    chain = vector_chain(MLP, 3, backward="reverse").double()
    x = torch.randn(5, 6).double()
    plain = rd.check_gradients(chain, x)
    memory = rd.measure_memory(chain, x)
    assert plain.worst > 0
    with torch.no_grad():
        assert rd.check_gradients(chain, x).errors == plain.errors
        assert rd.measure_memory(chain, x) == memory
    chain.requires_grad_(False)
    x.requires_grad_()
    assert rd.measure_memory(chain, x).peak > 0
    assert rd.measure_memory(chain, x.detach()).peak > 0
    with pytest.raises(ValueError, match="two depths or more"):
        rd.check_memory(lambda depth: vector_chain(MLP, depth), x, depths=(3,))


class Rotated(nn.Module):
    """Product with a complex matrix."""

    def __init__(self, width):
        super().__init__()
        weight = torch.randn(width, width, dtype=torch.complex128) / 3
        self.weight = nn.Parameter(weight)
        self.wrong: complex = 0.0

    def forward(self, a):
        self.wrong *= 1j
        return a @ self.weight + self.wrong


def test_complex_streams_are_checked_whole():
    chain = rd.Chain([rd.Duplicate(), *(rd.Coupling(Rotated(4)) for _ in range(3)), rd.Fuse()])
    x = torch.randn(3, 4, dtype=torch.complex128)
    assert rd.check_reversible(chain, x).worst < 1e-12
    assert 0 < rd.check_gradients(chain, x).worst < 1e-12
    assert rd.measure_memory(chain, x).peak > 0
    chain[1].f.wrong = 1.0  # another number each time it is run, also along the imaginary axis
    with pytest.raises(rd.UnitError, match="recovered with a relative error"):
        rd.check_reversible(chain, x)
    chain.arithmetic = "fixed"
    with pytest.raises(rd.UnitError, match=r"holds real numbers, got torch\.complex128"):
        chain(x)


class Cached(nn.Module):
    """Layer that keeps a buffer for the last shape, as rotary embeddings do."""

    cache: torch.Tensor | None

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, a):
        if self.cache is None or self.cache.shape != a.shape:
            self.cache = torch.ones_like(a)
        return self.linear(a) * self.cache


class Averaging(nn.Module):
    """Layer that makes a buffer when it runs, and writes to another one through a view."""

    rows: torch.Tensor
    mean: torch.Tensor

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("rows", torch.zeros(2, width))
        self.first = [self.rows[0]]

    def forward(self, a):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(()))
        with torch.no_grad():
            self.first[0].lerp_(a.mean(0), 0.1)
        return self.linear(a)


def test_checks_and_plans_leave_no_buffer_behind():
    chain = vector_chain(Averaging, 2, backward="reverse")
    x = torch.randn(5, 6)
    for check in (rd.check_reversible, rd.measure_memory, partial(rd.plan, memory="1GiB")):
        check(chain, x)
        layers = [layer for layer in chain.modules() if isinstance(layer, Averaging)]
        assert len(layers) == 2
        for layer in layers:
            assert [*layer._buffers] == ["rows"]
            assert not layer.rows.any()


def test_buffers_that_are_made_on_the_way_are_gone_again():
    chain = vector_chain(Cached, 2, backward="reverse")
    for check in (rd.check_gradients, rd.check_reversible, rd.measure_memory):
        check(chain, torch.randn(5, 6))
        assert all(layer.cache is None for layer in chain.modules() if isinstance(layer, Cached))
    chain(torch.randn(3, 6))
    before = [layer.cache for layer in chain.modules() if isinstance(layer, Cached)]
    for check in (rd.check_gradients, rd.check_reversible, rd.measure_memory):
        check(chain, torch.randn(5, 6))
        after = [layer.cache for layer in chain.modules() if isinstance(layer, Cached)]
        assert all(one is other for one, other in zip(before, after, strict=True))
