"""Bad input and faults: one error that names its place, and no update after it."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, Attention
from torch import nn

import redivider as rd


def SGD(stage):
    return torch.optim.SGD(stage.parameters(), lr=0.1)


def build(loss=F.cross_entropy, **options):
    torch.manual_seed(0)
    couplings = [rd.Coupling(MLP(4)), rd.Coupling(Attention(4), takes=("mask",))]
    units = [nn.Linear(5, 4), rd.Duplicate(), *couplings, rd.Fuse("mean"), Pool(), nn.Linear(4, 3)]
    model = rd.Chain(units)
    return model, rd.Pipeline(model, stages=4, loss=loss, optimizer=SGD, **options)


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(1)


def batch(n: int = 0):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(3, 6, 5, generator=generator), torch.randint(3, (3,), generator=generator)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_stops_before_any_update(bad):
    model, pipe = build(
        lambda y, target: F.cross_entropy(y, target) * (bad if pipe_at() == 5 else 1)
    )
    count = 0

    def pipe_at():
        nonlocal count
        count += 1
        return count - 1

    for n in range(8):
        pipe.step(*batch(n))
    before = weights(model)
    with pytest.raises(
        FloatingPointError, match=r"the loss of micro-batch 5 is (nan|inf)"
    ) as raised:
        pipe.step(*batch(8))
    assert "in stage 3, loss, micro-batch 5" in raised.value.__notes__
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for call in (lambda: pipe.step(*batch()), pipe.flush, lambda: pipe.save("nowhere")):
        with pytest.raises(RuntimeError, match="stopped in the middle of a tick by: FloatingPoint"):
            call()


def test_a_stopped_pipeline_goes_on_from_a_state():
    bad = [1.0]
    _, pipe = build(lambda y, target: F.cross_entropy(y, target) * bad[0])
    for n in range(6):
        pipe.step(*batch(n))
    state = pipe.state_dict()
    true = pipe.step(*batch(6)).loss
    bad[0] = torch.nan
    with pytest.raises(FloatingPointError):
        pipe.step(*batch(7))
    bad[0] = 1.0
    pipe.load_state_dict(state)
    assert torch.equal(pipe.step(*batch(6)).loss, true)


def test_errors_name_stage_unit_and_micro_batch():
    model, pipe = build()
    pipe.step(*batch())
    with pytest.raises(RuntimeError) as raised:
        pipe.step(torch.randn(3, 6, 7), batch()[1])
    assert "in stage 0, unit 0, Linear, micro-batch 1" in raised.value.__notes__
    del model


@pytest.mark.parametrize("method", ["petra", "delayed", "delayed-graph", "approximate-input"])
@pytest.mark.parametrize("latency", [0.5, 1])
def test_a_step_with_an_input_that_the_first_stage_refuses_has_no_effect(method, latency):
    """Also where a unit before the one that raises has kept the micro-batch."""

    def run(*bad):
        torch.manual_seed(0)
        front = [nn.Linear(5, 4), nn.Dropout(0.2), Refuses(), rd.Duplicate()]
        model = rd.Chain([*front, rd.Coupling(MLP(4)), rd.Fuse("mean"), Pool(), nn.Linear(4, 3)])
        pipe = rd.Pipeline(
            model,
            stages=[5, 1, 2],
            loss=F.cross_entropy,
            optimizer=SGD,
            method=method,
            latency=latency,
            accumulate=2,
            lookahead=method == "delayed",
            seed=0,
        )
        probe = pipe.probe(every=3)
        losses = []
        for n in range(9):
            if n in bad:
                x, target = torch.full((3, 6, 5), 1e9), batch()[1]
                with pytest.raises(ValueError, match="too large") as raised:
                    pipe.step(x, target)
                assert "in stage 0, unit 2, Refuses" in raised.value.__notes__[0]
                assert "had no effect" in raised.value.__notes__[-1]
                x.zero_()  # it is not in flight
                for wrong in (None, x.numpy()):
                    with pytest.raises(TypeError, match=r"needs a tensor.*(NoneType|from_numpy)"):
                        pipe.step(wrong, target)
            losses.append(pipe.step(*batch(n)).loss)
        losses += [tick.loss for tick in pipe.flush(update=True)]
        assert not any(unit.kept for stage in pipe.stages for unit in stage.units)
        stashes = [unit.weights.stash for stage in pipe.stages for unit in stage.units]
        assert not any(stash.copies for stash in stashes if stash)
        return [loss for loss in losses if loss is not None], model.state_dict(), probe.take()

    ours, theirs = run(0, 4, 5), run()
    assert len(ours[0]) == 9 and all(map(torch.equal, ours[0], theirs[0]))
    assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())
    assert str(ours[2]) == str(theirs[2])  # with NaN


class Refuses(nn.Module):
    """A unit that takes small values only."""

    def forward(self, x):
        if x.abs().max() > 1e6:
            raise ValueError("too large")
        return x


def test_a_step_that_fails_behind_the_first_stage_stops_the_pipeline():
    _, pipe = build()
    for n in range(3):
        pipe.step(*batch(n))
    with pytest.raises(TypeError):
        for n in range(3, 7):
            pipe.step(batch(n)[0])  # without a target
    with pytest.raises(RuntimeError, match="stopped in the middle of a tick by: TypeError"):
        pipe.step(*batch(6))


def test_an_overflow_of_the_grid_names_its_place():
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(30.0))

        def forward(self, x):
            return x * self.gain

    units = [nn.Linear(5, 4), rd.Split(), *(rd.Coupling(Grows()) for _ in range(4)), rd.Fuse()]
    pipe = rd.Pipeline(units, stages=4, loss=F.mse_loss, optimizer=SGD, arithmetic="fixed")
    with pytest.raises(OverflowError, match=r"Coupling\(Grows\): a stream left the range"):
        for _ in range(5):
            pipe.step(torch.ones(3, 5), torch.ones(3, 4))


def test_side_inputs_are_checked_before_anything_runs():
    _, pipe = build()
    x, target = batch()
    with pytest.raises(TypeError, match=r"no unit takes the keyword 'maks'.*did you mean 'mask'"):
        pipe.step(x, target, maks=None)
    with pytest.raises(ValueError, match=r"'mask' requires grad.*train with a Chain"):
        pipe.step(x, target, mask=torch.zeros(6, 6, requires_grad=True))
    pipe.step(x, target, mask=torch.zeros(6, 6))  # and nothing was lost


def test_bad_options_are_refused_at_construction():
    wrong_values: list[tuple[dict[str, Any], str]] = [
        ({"method": "petri"}, "'petra', 'dsp', .*got 'petri'"),
        ({"accumulate": 0}, "accumulate must be a whole number, at least 1, got 0"),
        ({"accumulate": 1.5}, "accumulate must be a whole number, at least 1, got 1.5"),
        ({"latency": 0}, "latency must be .* got 0"),
        ({"latency": "2"}, "latency must be .* got '2'"),
        ({"clip_norm": -1.0}, "clip_norm must be None or a number above 0, got -1.0"),
        ({"clip_norm": 0}, "above 0, got 0"),
        ({"clip_norm": float("nan")}, "above 0, got nan"),
        ({"arithmetic": "exact"}, "'float', 'fixed'"),
        ({"clip_norm": 1.0, "clip_over": "everything"}, 'must be "stage" or "all"'),
    ]
    for options, message in wrong_values:
        with pytest.raises(ValueError, match=message):
            build(**options)
    numbers = {"accumulate": np.int64(2), "latency": np.int32(1), "clip_norm": np.float32(1)}
    assert build(**numbers)[1].accumulate == 2, "numbers of numpy are numbers"
    wrong_types: list[tuple[dict[str, Any], str]] = [
        ({"loss": nn.CrossEntropyLoss}, r"CrossEntropyLoss\(\) makes one"),
        ({"loss": None}, "loss must be a function or module of .* got None"),
        ({"lr_lambda": 0.1}, "lr_lambda must be a function of the update's number, got 0.1"),
        ({"lr_by_delay": "yes"}, "lr_by_delay must be True or False, got 'yes'"),
    ]
    for options, message in wrong_types:
        with pytest.raises(TypeError, match=message):
            build(**options)


def test_an_optimizer_must_be_made_for_each_stage():
    model = build()[0]
    for optimizer, message in [
        (SGD(model), r"function that makes one for a stage, such as lambda stage: .* got SGD"),
        (torch.optim.SGD, "function that makes one for a stage, .* got SGD"),
        (None, "function that makes one for a stage, .* got NoneType"),
        (lambda stage: None, "must return a torch.optim.Optimizer, .* got NoneType for stage 0"),
        (lambda stage: SGD(model), "made for stage 0 has 14 parameters that are not of that stage"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            rd.Pipeline(model, stages=4, loss=F.cross_entropy, optimizer=optimizer)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_units_without_weights_are_refused_at_construction(device):
    lazy = nn.LazyLinear(3, device=device) if device == "cpu" else nn.Linear(4, 3, device=device)
    with pytest.raises(
        ValueError, match=r"unit 1, (LazyLinear|Linear): its parameters have no val"
    ):
        rd.Pipeline([nn.Linear(5, 4), lazy], stages=2, loss=F.cross_entropy, optimizer=SGD)


def test_a_compiled_coupling_is_refused_at_construction():
    units = [nn.Linear(5, 4), rd.Split(), torch.compile(rd.Coupling(MLP(2)), backend="aot_eager")]
    with pytest.raises(TypeError, match="unit 2 is a compiled coupling"):
        rd.Pipeline(units, stages=2, loss=F.mse_loss, optimizer=SGD)


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda y, target: y, r"one number, or \(loss, aux\), got shape \(3, 3\)"),
        (lambda y, target: (y.sum(), y, y), r"one number, or \(loss, aux\), got a tuple of 3"),
        (lambda y, target: 3.0, "got float"),
    ],
)
def test_a_loss_must_be_one_number(loss, message):
    _, pipe = build(loss)
    with pytest.raises(ValueError, match="stage 3, loss, micro-batch 0: .*" + message):
        for n in range(4):
            pipe.step(*batch(n))


def test_a_loss_that_reaches_for_others_weights_is_refused():
    outside = nn.Linear(3, 3)
    _, pipe = build(lambda y, target: F.cross_entropy(outside(y), target))
    with pytest.raises(ValueError, match=r"stage 3, loss.*neither an argument nor a parameter"):
        for n in range(4):
            pipe.step(*batch(n))


def test_losses_with_parameters_and_extra_outputs():
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = nn.Parameter(torch.zeros(()))

        def forward(self, y, target):
            loss = F.cross_entropy(y * self.log.exp(), target)
            return loss, {"hits": (y.argmax(1) == target).sum(), "logits": y}

    loss = Temperature()
    _, pipe = build(loss)
    assert "loss.log" in dict(pipe.stages[-1].module.named_parameters())
    ticks = [pipe.step(*batch(n)) for n in range(6)]
    assert [tick.microbatch for tick in ticks] == [None, None, None, 0, 1, 2]
    assert ticks[0].loss is None and ticks[0].aux is None
    assert ticks[3].aux["logits"].shape == (3, 3) and not ticks[3].aux["logits"].requires_grad
    assert loss.log.item() != 0.0, "it was trained"


def test_gradients_left_from_before_do_not_count():
    model, _ = build()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    clean, clean_pipe = build()
    pipe = rd.Pipeline(model, stages=4, loss=F.cross_entropy, optimizer=SGD, seed=0)
    for n in range(9):
        pipe.step(*batch(n))
        clean_pipe.step(*batch(n))
    for one, other in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(one, other)


def test_frozen_stages_have_no_optimizer_and_stay_as_they_are():
    torch.manual_seed(0)
    frozen = nn.Linear(5, 4).requires_grad_(False)
    units = [frozen, rd.Split(), rd.Coupling(MLP(2)), rd.Fuse(), nn.Linear(4, 3)]
    modules = []

    def optimizer(module):
        modules.append(module)
        return SGD(module)

    pipe = rd.Pipeline(units, stages=[1, 2, 2], loss=F.cross_entropy, optimizer=optimizer)
    before = frozen.weight.clone()
    for n in range(8):
        x, target = batch(n)
        pipe.step(x[:, 0], target)
    assert modules == [stage.module for stage in pipe.stages[1:]]
    assert torch.equal(frozen.weight, before)
    assert [stage.num_updates for stage in pipe.stages] == [4, 5, 6]


def test_units_may_have_any_name_but_that_of_the_loss():
    """A stage has attributes of its own, which a unit's name must not meet."""
    names = ["module", "norm", "index", "optimizer", "update"]
    units = [nn.Linear(5, 4), rd.Split(), rd.Coupling(MLP(2)), rd.Fuse(), nn.Linear(4, 3)]
    seen: list[str] = []

    def optimizer(stage):
        seen.extend(key for key, _ in stage.named_children())
        return SGD(stage)

    pipe = rd.Pipeline(
        rd.Chain(dict(zip(names, units, strict=True))),
        stages=2,
        loss=F.cross_entropy,
        optimizer=optimizer,
        clip_norm=1.0,
    )
    x, target = batch(0)
    for _ in range(4):
        pipe.step(x[:, 0], target)
    assert seen == names
    assert all(stage.num_updates for stage in pipe.stages)

    class Scaled(nn.Linear):
        def forward(self, y, target):  # type: ignore[override]
            return F.cross_entropy(super().forward(y), target)

    with pytest.raises(ValueError, match="a unit of the last stage is called 'loss'"):
        rd.Pipeline(rd.Chain({"loss": nn.Linear(5, 3)}), stages=1, loss=Scaled(3, 3), optimizer=SGD)
