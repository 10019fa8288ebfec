"""Modules that users put into a pipeline, and changes to them while micro-batches are in flight."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import redivider as rd
from redivider.errors import ChangedError, UnitError
from redivider.pipeline.checkpoint.files import StateError
from redivider.pipeline.methods import METHODS


def network(make, width=6):
    torch.manual_seed(0)
    couplings = [rd.Coupling(make()) for _ in range(4)]
    head = nn.Linear(2 * width, 2)
    return nn.ModuleList([nn.Linear(3, width), rd.Duplicate(), *couplings, rd.Fuse(), head])


def build(units, lr=0.05, stages="auto", loss=F.mse_loss, momentum=0.0, **options):
    def optimizer(stage):
        return torch.optim.SGD(stage.parameters(), lr=lr, momentum=momentum)

    units = list(units)
    return rd.Pipeline(units, stages=stages, loss=loss, optimizer=optimizer, **options)


def batches(number, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator))
        for _ in range(number)
    ]


def weights(units):
    return torch.cat([p.detach().flatten().double() for p in units.parameters()])


class Perceptron(nn.Module):
    """Its activations are computed again where that is asked for."""

    def __init__(self, again=False):
        super().__init__()
        self.one, self.two, self.again = nn.Linear(6, 6), nn.Linear(6, 6), again

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)

    def body(self, x):
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_torchs_checkpoint_inside_of_a_unit_sees_the_weights_of_its_run(method):
    ends = []
    for again in (False, True):
        units = network(lambda again=again: Perceptron(again)).double()
        pipe = build(units, method=method)
        for x, target in batches(20):
            pipe.step(x.double(), target.double())
        pipe.flush()
        ends.append(weights(units))
    assert torch.equal(*ends)


class Masked(nn.Module):
    """Has a buffer that it reads and does not write."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6).eval()
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x):
        return self.norm(self.inner(x)) * self.mask


def test_autocast_may_begin_when_a_unit_has_run_before():
    units = network(Masked)
    for unit in units[2:6]:
        unit.f.norm.eval()
    pipe = build(units)
    for n, (x, target) in enumerate(batches(30)):
        with torch.autocast("cpu", torch.bfloat16, enabled=n >= 10):
            pipe.step(x, target)
    pipe.flush()
    other = build(units)  # and once more
    with torch.autocast("cpu", torch.bfloat16):
        for x, target in batches(12):
            other.step(x, target)


def test_a_view_of_a_buffer_that_is_filled_again_is_refused():
    units = nn.ModuleList([*(rd.Coupling(nn.Linear(3, 3)) for _ in range(3)), rd.Fuse()])
    pipe, filled = build(units), torch.empty(2, 5, 3)
    with pytest.raises(ChangedError, match="the input of micro-batch 0 was changed in place"):
        for x, _ in batches(9):
            filled[0].copy_(x)
            filled[1].copy_(2 * x)
            pipe.step((filled[0], filled[1]), torch.zeros(5, 6))
    wide, pipe = torch.empty(5, 9), build(network(lambda: nn.Linear(6, 6)))
    for x, target in batches(9):
        wide[:, 2:5] = x
        pipe.step(wide[:, 2:5], target)  # has gaps, so that a copy is in flight


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.1))

    def forward(self, x):
        return self.scale * x


@pytest.mark.parametrize("method", ["petra", "approximate-input"])
def test_a_stream_that_leaves_the_grid_on_its_way_back_is_a_fault(method):
    """In a pipeline it goes back by other weights than it came."""
    units = nn.ModuleList([*(rd.Coupling(Scaled()) for _ in range(3)), rd.Fuse("add")])
    loss = lambda y, target: (y - target).square().sum()  # noqa: E731
    pipe = build(units, lr=3.0, loss=loss, arithmetic="fixed", method=method)
    with pytest.raises(OverflowError, match=r"Coupling\(Scaled\).*Fixed\(bits=20\)"):
        for x, target in batches(4):
            pipe.step((x, 2 * x), target[:, :1])
        pipe.flush()


def test_a_stage_that_is_frozen_has_no_norm():
    units = network(lambda: nn.Linear(6, 6))
    pipe = build(units, stages=3, clip_norm=0.5, clip_over="all")
    for n, (x, target) in enumerate(batches(30)):
        if n == 10:
            pipe.flush()
            assert all(stage.norm > 0 for stage in pipe.stages)
            pipe.stages[0].module.requires_grad_(False)
        pipe.step(x, target)
    assert [bool(stage.norm > 0) for stage in pipe.stages] == [False, True, True]


def test_hooks_on_the_parameters_of_a_loss_are_refused():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))
            self.temperature.register_hook(torch.zeros_like)

        def forward(self, y, target):
            return ((y - target) * self.temperature).square().mean()

    with pytest.raises(UnitError, match="the loss: a parameter has a hook for its gradient"):
        build(network(lambda: nn.Linear(6, 6)), loss=Tempered())


def test_what_a_loss_tells_of_its_weights_is_of_its_own_time():
    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, y, target):
            return F.mse_loss(y + self.bias, target), {"bias": self.bias}

    loss = Telling()
    pipe = build(network(lambda: nn.Linear(6, 6)), loss=loss)
    extras, biases = [], []
    for x, target in batches(20):
        biases.append(loss.bias.detach().clone())
        extras.append(pipe.step(x, target).aux)
    known = [(aux["bias"], b) for aux, b in zip(extras, biases, strict=True) if aux is not None]
    assert len(known) == 20 - 7
    assert all(torch.equal(*pair) for pair in known)


class Turning(nn.Module):
    """Computes something else every time, by a number that its state_dict does not have."""

    angle: Tensor

    def __init__(self, *sizes):
        super().__init__()
        self.inner = nn.Linear(*sizes) if sizes else None
        self.register_buffer("angle", torch.zeros(()), persistent=False)

    def forward(self, x, target=None):
        self.angle.add_(0.1)
        if self.inner is None:
            return F.mse_loss(x, target) * torch.cos(self.angle)
        return self.inner(x) * torch.cos(self.angle)


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
def test_buffers_that_are_not_persistent_are_in_the_state(on_disk, tmp_path):
    one, other = (network(lambda: Turning(6, 6)) for _ in range(2))
    first, second = build(one, loss=Turning()), build(other, loss=Turning())
    for x, target in batches(20):
        first.step(x, target)
    if on_disk:
        first.save(tmp_path / "state")
        second.load(tmp_path / "state")
    else:
        between = build(network(lambda: Turning(6, 6)), loss=Turning())  # which does not run
        between.load_state_dict(first.state_dict())
        second.load_state_dict(between.state_dict())
    for x, target in batches(20, seed=2):
        assert torch.equal(first.step(x, target).loss, second.step(x, target).loss)
    assert torch.equal(weights(one), weights(other))


class Cached(nn.Module):
    """Its table is created at the first run if need be, and grows with every run."""

    table: Tensor | None

    def __init__(self, first):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("table", first, persistent=False)

    def forward(self, x):
        old = torch.zeros(0) if self.table is None else self.table
        self.table = torch.cat([old, old.new_ones(1)])
        return self.inner(x) / self.table.sum()


@pytest.mark.slow
@pytest.mark.parametrize("first", [None, torch.ones(2)], ids=["none", "short"])
def test_buffers_of_other_sizes_are_put_back(first):
    one, other = (network(lambda: Cached(first)) for _ in range(2))
    pipe, fresh = build(one), build(other)
    begin = pipe.state_dict()  # of units that have not run
    losses = [pipe.step(*batch).loss for batch in batches(12)]
    fresh.load_state_dict(pipe.state_dict())
    for batch in batches(12, seed=2):
        assert torch.equal(pipe.step(*batch).loss, fresh.step(*batch).loss)
    if first is not None:
        pipe.load_state_dict(begin)
        again = [pipe.step(*batch).loss for batch in batches(12)]
        assert [loss and loss.item() for loss in again] == [loss and loss.item() for loss in losses]
    state = pipe.state_dict()
    state["units"]["2"]["buffers"]["f.other"] = torch.zeros(1)
    with pytest.raises(StateError, match=r"Coupling\(Cached\) differs.*no buffer 'f.other'"):
        fresh.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["zero", "freeze"])
def test_look_ahead_sees_weights_that_somebody_changed(change):
    """Between two updates, where nothing that the pipeline counts has changed."""
    units = network(lambda: nn.Linear(6, 6))
    pipe = build(units, lookahead=True, momentum=0.9, accumulate=4, stages=4)
    for x, target in batches(46)[:45]:
        pipe.step(x, target)
    stage = pipe.stages[0]
    before = [weight.clone() for weight in stage.forward_weights(stage.units[0])]
    assert all(map(torch.equal, before, stage.forward_weights(stage.units[0])))
    if change == "zero":
        with torch.no_grad():
            units[0].weight.zero_()
    else:
        units[0].requires_grad_(False)
    after = [weight.clone() for weight in stage.forward_weights(stage.units[0])]
    stage.forget_prediction()
    assert all(map(torch.equal, after, stage.forward_weights(stage.units[0])))
    assert not torch.equal(before[0], after[0]) or change == "freeze"


class Own(torch.optim.Optimizer):
    """Keeps a number for itself beside those of its parameters."""

    state: Any

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] += 1
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 / self.state["steps"] * param.grad)


def test_an_optimizer_may_have_a_state_of_its_own(tmp_path):
    pipes, ends = [], []
    for _ in range(2):
        units = network(lambda: nn.Linear(6, 6))
        pipe = rd.Pipeline(
            list(units),
            stages=3,
            loss=F.mse_loss,
            optimizer=lambda stage: Own(stage.parameters()),
        )
        pipes.append((units, pipe))
    for x, target in batches(12):
        pipes[0][1].step(x, target)
    pipes[0][1].save(tmp_path / "state")
    pipes[1][1].load(tmp_path / "state")
    for units, pipe in pipes:
        for x, target in batches(12, seed=2):
            pipe.step(x, target)
        ends.append(weights(units))
        optimizer: Any = pipe.stages[-1].optimizer
        assert optimizer.state["steps"] == pipe.stages[-1].num_updates
    assert torch.equal(*ends)


def test_nothing_is_lost_by_a_flush_in_inference_mode():
    units = network(lambda: nn.Linear(6, 6))
    pipe = build(units)
    for x, target in batches(12):
        pipe.step(x, target)
    with torch.inference_mode():
        for wrong in (pipe.flush, lambda: pipe.step(*batches(1)[0])):
            with pytest.raises(RuntimeError, match=r"cannot do so under torch\.inference_mode"):
                wrong()
    assert len(pipe.flush()) == 8 - 1  # stages that what had entered had not yet passed


class Batch(OrderedDict):
    x = property(lambda self: self["x"])


register_pytree_node(
    Batch, lambda b: (list(b.values()), list(b)), lambda v, k: Batch(zip(k, v, strict=True))
)


def test_a_dictionary_that_is_more_than_one_is_not_saved_as_one(tmp_path):
    class Reads(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x)

    units = network(lambda: nn.Linear(6, 6))
    units[0] = Reads(3, 6)
    pipe = build(units)
    for x, target in batches(12):
        pipe.step(Batch(x=x), target)
    with pytest.raises(StateError, match=r"cannot hold a Batch.*flush\(\)"):
        pipe.save(tmp_path / "state")
    pipe.flush()
    pipe.save(tmp_path / "state")


@pytest.mark.slow
def test_a_probe_sees_through_torchs_checkpoint():
    cosines = []
    for again in (False, True):
        pipe = build(network(lambda again=again: Perceptron(again)), method="petra")
        probe = pipe.probe(every=1)
        for x, target in batches(30):
            pipe.step(x, target)
        cosines.append([(row.stage, row.cosine_to_delayed) for row in probe.take()])
    assert cosines[0] and cosines[0] == cosines[1]


def test_weights_of_few_bits_may_be_in_a_stage():
    class Few(nn.Module):
        def __init__(self):
            super().__init__()
            few = torch.randn(6, 6).to(torch.float8_e4m3fn)
            self.few = nn.Parameter(few, requires_grad=False)
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return self.inner(x @ self.few.float())

    pipe = build(network(Few), stages=3, clip_norm=1.0)
    for x, target in batches(9):
        pipe.step(x, target)
    assert {stage.norm.dtype for stage in pipe.stages} == {torch.float32}


@pytest.mark.slow
def test_what_is_frozen_does_not_move_by_graphs_that_were_made_before():
    for method in METHODS:
        units = network(lambda: nn.Linear(6, 6))
        pipe = build(units, method=method)
        for x, target in batches(20):
            pipe.step(x, target)
        units[0].requires_grad_(False)
        frozen = units[0].weight.clone()
        for x, target in batches(20):
            pipe.step(x, target)
        assert torch.equal(units[0].weight, frozen), method


def test_norms_of_several_dtypes_are_saved_as_they_are():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
            self.inner = nn.Linear(3, 6)

        def forward(self, x):
            return self.inner(x) * self.scale.float()

    pipes = []
    for _ in range(2):
        units = network(lambda: nn.Linear(6, 6))
        units[0] = Mixed()
        pipes.append(build(units, clip_norm=0.05, clip_over="all"))
    for x, target in batches(20):
        pipes[0].step(x, target)
    pipes[1].load_state_dict(pipes[0].state_dict())
    norms = [[(stage.norm.dtype, stage.norm.item()) for stage in pipe.stages] for pipe in pipes]
    assert norms[0] == norms[1]


def test_units_by_name_and_units_that_are_none():
    named = {name: nn.Linear(3, 3) for name in ("stem", "head")}
    pipe = rd.Pipeline(
        named,
        stages=2,
        loss=F.mse_loss,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
        seed=np.int64(3),  # type: ignore[arg-type]
    )
    assert list(pipe.full_state_dict()) == ["stem.weight", "stem.bias", "head.weight", "head.bias"]
    assert type(pipe.seed) is int
    with pytest.raises(TypeError, match=r"unit 1 must be a torch\.nn\.Module, got builtin"):
        build([nn.Linear(3, 3), torch.tanh])

    class Doubled(rd.Coupling):
        def residual(self, a, side):
            return 2 * super().residual(a, side)

    doubled = nn.ModuleList([rd.Duplicate(), Doubled(nn.Linear(3, 3)), rd.Fuse()])
    with pytest.raises(TypeError, match="has a residual of its own"):
        build(doubled)
    for names in (("a.b", "a"), ("a", "a.b"), (1, "1")):
        wrong = {name: nn.Linear(3, 3) for name in names}
        with pytest.raises(ValueError, match=r"cannot be called 'a\.b'|called '1'"):
            rd.Pipeline(
                wrong,
                stages=2,
                loss=F.mse_loss,
                optimizer=lambda stage: None,  # type: ignore[arg-type,return-value]
            )
