"""Bad input: one clear error that names the unit, and nothing half-written."""

from typing import Any

import pytest
import torch
from support.networks import MLP, Attention
from torch import nn

import redivider as rd

ALL = ("store", "checkpoint", "reverse", "reverse-checkpoint")


class Changes(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8), change

    def forward(self, x):
        return self.change(self.linear(x))


def test_settings_of_a_chain_are_checked_whenever_they_are_set():
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(MLP(8)), rd.Fuse()])
    with pytest.raises(ValueError, match=r"backward must be one of 'store', .* got 'foo'"):
        chain.backward = "foo"
    with pytest.raises(ValueError, match=r"arithmetic must be one of .* got 'foo'"):
        chain.arithmetic = "foo"
    chain.arithmetic = "fixed"
    assert chain.arithmetic.exact and chain.backward == "reverse"
    settings: list[tuple[str, Any]]
    settings = [("check_every", 1.5), ("check_every", -1), ("drift_tolerance", "a")]
    for name, value in settings:
        with pytest.raises(ValueError, match=f"{name} must be 0"):
            rd.Chain([rd.Duplicate()], **{name: value})


@pytest.mark.parametrize("backward", ALL)
def test_a_pair_of_streams_that_nobody_fused_is_told(backward):
    units = [rd.Duplicate(), rd.Coupling(MLP(8)), nn.Linear(8, 8)]
    with pytest.raises(TypeError) as raised:
        rd.Chain(units, backward=backward)(torch.randn(2, 8))
    assert any(
        "Linear, which was given a pair of streams: rd.Fuse makes" in note
        for note in raised.value.__notes__
    )
    units[2:] = [rd.Fuse("mean"), Changes(lambda y: y + None)]
    with pytest.raises(TypeError) as raised:
        rd.Chain(units, backward=backward)(torch.randn(2, 8))
    assert raised.value.__notes__ and not any("rd.Fuse" in note for note in raised.value.__notes__)


def test_streams_must_be_floating_point():
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(nn.Identity())])
    with pytest.raises(ValueError, match=r"unit 1.*must be floating point, got int64 \(4,\)"):
        chain(torch.arange(4))


def test_a_coupling_with_a_forward_of_its_own_is_refused():
    class Own(rd.Coupling):
        def forward(self, streams):  # type: ignore[override]
            a, b = streams
            return b + self.f(a), a

    class Scaled(rd.Coupling):
        def forward(self, streams):  # type: ignore[override]
            a, b = streams
            return super().forward((2 * a, b))

    for kind in (Own, Scaled):
        chain = rd.Chain([rd.Duplicate(), kind(MLP(8)), rd.Fuse()])
        with pytest.raises(ValueError, match=r"^unit 1, \w+\(MLP\): it has a forward of its own"):
            chain(torch.randn(5, 8))
        chain.backward = "store"
        chain(torch.randn(5, 8))


CHANGES = {
    "shape": (lambda y: y[..., :4], r"float32 \(5, 8\) on cpu into float32 \(5, 4\) on cpu"),
    "broadcast": (lambda y: y.sum(-1, keepdim=True), r"into float32 \(5, 1\)"),
    "wider dtype": (lambda y: y.double(), "into float64"),
    "narrower dtype": (lambda y: y.bfloat16(), "into bfloat16"),
    "integers": (lambda y: y.long(), "into int64"),
    "device": (lambda y: y.to("meta"), "on meta"),
    "tuple": (lambda y: (y, y), "must return (one tensor, got tuple|tensors)"),
    "nothing": (lambda y: None, "must return (one tensor|tensors), got NoneType"),
}


@pytest.mark.parametrize("backward", ALL)
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
@pytest.mark.parametrize("change", CHANGES)
def test_f_must_keep_shape_dtype_and_device(change, arithmetic, backward):
    function, message = CHANGES[change]
    couplings = [rd.Coupling(MLP(8)), rd.Coupling(Changes(function)), rd.Coupling(MLP(8))]
    chain = rd.Chain([rd.Duplicate(), *couplings], backward=backward, arithmetic=arithmetic)
    for grad_mode in (torch.enable_grad(), torch.no_grad()):
        with grad_mode, pytest.raises(ValueError, match=r"unit 2, Coupling\(Changes\).*" + message):
            chain(torch.randn(5, 8))
    assert all(param.grad is None for param in chain.parameters())


def test_f_may_be_narrower_than_its_stream_under_autocast_but_not_wider():
    for change, fits in ((lambda y: y.half(), True), (lambda y: y.double(), False)):
        chain = rd.Chain([rd.Duplicate(), rd.Coupling(Changes(change))])
        with torch.autocast("cpu", torch.bfloat16):
            if fits:
                assert chain(torch.randn(5, 8))[0].dtype == torch.float32
            else:
                with pytest.raises(ValueError, match="into float64"):
                    chain(torch.randn(5, 8))


@pytest.mark.parametrize("backward", ALL)
def test_streams_must_be_an_equal_pair(backward):
    chain = rd.Chain([nn.Identity(), rd.Coupling(MLP(8))], backward=backward)
    x = torch.randn(5, 8)
    for bad, message in [
        ((x, x[:4]), r"a is float32 \(5, 8\) on cpu, b is float32 \(4, 8\)"),
        ((x, x.double()), "b is float64"),
        ((x, x.to("meta")), "b is float32.*on meta"),
        (x, r"got float32 \(5, 8\) on cpu; Duplicate or Split"),
        ((x, x, x), r"got tuple of \['Tensor', 'Tensor', 'Tensor'\]"),
        (None, "got NoneType; Duplicate"),
        ((x, None), r"got tuple of \['Tensor', 'NoneType'\]"),
    ][: 5 if "checkpoint" in backward else 7]:  # there unit 0 would refuse None itself
        with pytest.raises(ValueError, match=r"unit 1, Coupling\(MLP\).*" + message):
            chain(bad)


def test_a_coupling_alone_says_the_same():
    with pytest.raises(ValueError, match="the streams differ"):
        rd.Coupling(MLP(8))((torch.randn(5, 8), torch.randn(4, 8)))
    with pytest.raises(ValueError, match="keep shape"):
        rd.Coupling(nn.Linear(8, 4)).inverse((torch.randn(5, 8), torch.randn(5, 8)))
    with pytest.raises(TypeError, match=r"torch.nn.Module, got builtin_function_or_method"):
        rd.Coupling(torch.sin)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes=\('mask',\)"):
        rd.Coupling(Attention(8), takes="mask")


def test_an_output_changed_in_place_before_the_backward_raises():
    for stream, pattern in ((0, "inplace operation"), (1, "inplace operation")):
        chain = rd.Chain([rd.Duplicate(), *(rd.Coupling(MLP(8)) for _ in range(3))])
        y = chain(torch.randn(5, 8))
        with torch.no_grad():
            y[stream].mul_(2)
        with pytest.raises(RuntimeError, match=r"unit 3, Coupling\(MLP\).*output.*" + pattern):
            y[0].sum().backward()


def test_a_junction_that_writes_into_the_streams_is_found():
    class Doubles(nn.Module):
        def forward(self, streams):
            return streams[0].mul_(2)

    chain = rd.Chain([rd.Duplicate(), rd.Coupling(MLP(8)), rd.Coupling(MLP(8)), Doubles()])
    y = chain(torch.randn(5, 8))
    with pytest.raises(RuntimeError, match=r"unit 2, Coupling\(MLP\).*inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
@pytest.mark.parametrize("backward", ALL)
def test_an_f_that_writes_into_its_input_is_refused(backward, arithmetic, requires_grad):
    f = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    units = [rd.Duplicate(), rd.Coupling(f), rd.Coupling(MLP(8))]
    chain = rd.Chain(units, backward=backward, arithmetic=arithmetic)
    for grad_mode in (torch.enable_grad, torch.enable_grad, torch.no_grad):
        x = torch.randn(5, 8, requires_grad=requires_grad) * 2
        with grad_mode(), pytest.raises(ValueError, match=r"unit 1, Coupling.*writes into"):
            chain(x)


def test_arguments_of_a_chain_are_checked():
    with pytest.raises(
        ValueError,
        match=r"'store', .* 'reverse-checkpoint', .* 'auto', got 'invert'",
    ):
        rd.Chain([nn.Identity()], backward="invert")
    with pytest.raises(ValueError, match="at least one unit"):
        rd.Chain([])
    with pytest.raises(TypeError, match="a list of units, got one Linear"):
        rd.Chain(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unit 1 must be .*Module, got function"):
        rd.Chain([nn.Identity(), lambda x: x])  # type: ignore[list-item]


def test_errors_of_the_users_own_modules_keep_their_kind_and_get_a_note():
    chain = rd.Chain([nn.Linear(6, 8), nn.Linear(6, 8)])
    with pytest.raises(RuntimeError) as raised:
        chain(torch.randn(5, 6))
    assert raised.value.__notes__ == ["in unit 1, Linear"]


@pytest.mark.parametrize("backward", ["checkpoint", "reverse"])
def test_errors_in_the_second_run_get_a_note_too_and_leave_f_as_it_was(backward):
    class FailsSecond(MLP):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("no")
            return super().forward(x)

    f = FailsSecond(8, dropout=0.5)
    chain = rd.Chain([rd.Duplicate(), rd.Coupling(f), rd.Fuse()], backward=backward)
    y = chain(torch.randn(5, 8))
    f.fails = True
    chain.eval()
    weight, state = f[1].weight, torch.get_rng_state()
    with pytest.raises(KeyError) as raised:
        y.sum().backward()
    assert "in unit 1, Coupling(FailsSecond)" in raised.value.__notes__
    assert f[1].weight is weight and not f.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_unit_that_keeps_its_input_must_return_tensors():
    class Numbers(nn.Module):
        def forward(self, x):
            return x, 3

    with pytest.raises(ValueError, match="unit 0, Numbers: Numbers must return tensors, got tuple"):
        rd.Chain([Numbers()], backward="checkpoint")(torch.randn(3, requires_grad=True))
