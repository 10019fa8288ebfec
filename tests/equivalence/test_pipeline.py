"""Semantics of a pipeline: gradients, delays, number of runs, memory held, statistics."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, Attention, ConvNorm
from support.oracle import run_plainly
from support.pipelines import CUTS, batches, network
from support.reference import METHODS
from torch import Tensor, nn

import redivider as rd
from redivider.pipeline.schedule import Schedule


class Spy(torch.optim.SGD):
    """Changes no weight, and records the gradients of every step."""

    def __init__(self, stage) -> None:
        self.named = dict(stage.named_parameters())
        super().__init__(stage.parameters(), lr=0.0)
        self.seen: list[dict[str, torch.Tensor]] = []

    def step(self, closure=None):
        self.seen.append({name: p.grad.clone() for name, p in self.named.items()})
        return super().step(closure)


def spied(model, stages, method="petra", **options) -> rd.Pipeline:
    options = {"loss": F.cross_entropy, "optimizer": Spy, "method": method, "seed": 0, **options}
    return rd.Pipeline(model, stages=stages, **options)


def by_microbatch(pipe: rd.Pipeline) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of the whole model for each micro-batch."""
    spies: list[Any] = [stage.optimizer for stage in pipe.stages if stage.optimizer]
    seen = [spy.seen for spy in spies]
    assert len({len(steps) for steps in seen}) == 1
    return [dict(kv for part in parts for kv in part.items()) for parts in zip(*seen, strict=True)]


@pytest.mark.parametrize("stages, latency", [(3, 2), pytest.param(10, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_with_frozen_weights_every_gradient_is_backprops(method, stages, latency):
    model = network()
    plain = copy.deepcopy(model)
    pipe = spied(model, CUTS[stages], method, latency=latency)
    data = list(batches(8))
    for x, target in data:
        pipe.step(x, target)
    pipe.flush()
    gradients = by_microbatch(pipe)
    assert len(gradients) == 8
    for (x, target), grads in zip(data, gradients, strict=True):
        plain.zero_grad()
        F.cross_entropy(run_plainly(plain, x), target).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None, name
            assert torch.allclose(grads[name], parameter.grad, rtol=1e-11, atol=1e-15), name


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("arithmetic, accumulate", [("float", 3), ("fixed", 1)])
def test_one_stage_is_plain_training(method, arithmetic, accumulate):
    """To the last bit; methods that rebuild float streams are compared to a reversing chain."""
    # Split, not Duplicate: where one tensor becomes both streams, plain autograd adds three
    # gradients in an order of its own, and the last bit differs.
    model = rd.Chain([nn.Linear(5, 8).double(), rd.Split(), *list(network())[2:]])
    rebuilt = method in ("petra", "exact-inverse", "approximate-input") and arithmetic == "float"
    plain = rd.Chain(
        copy.deepcopy(list(model)),
        backward="reverse" if rebuilt else "store",
        arithmetic=arithmetic,
    )
    make = lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    pipe = rd.Pipeline(
        model,
        stages=1,
        loss=F.cross_entropy,
        optimizer=make,
        method=method,
        accumulate=accumulate,
        arithmetic=arithmetic,
    )
    optimizer = make(plain)
    for i, (x, target) in enumerate(batches(12), 1):
        tick = pipe.step(x, target)
        loss = F.cross_entropy(plain(x), target)
        assert tick.loss is not None and torch.equal(tick.loss, loss.detach())
        loss.backward()
        if i % accumulate == 0:
            for parameter in plain.parameters():
                parameter.grad /= accumulate
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name


class Watched(rd.Pipeline):
    when: dict[tuple[str, int, int], int]

    def _forward(self, j, n):
        self.when["F", j, n] = self.in_flight.tick
        return super()._forward(j, n)

    def _backward(self, j, n):
        self.when["B", j, n] = self.in_flight.tick
        return super()._backward(j, n)


@pytest.mark.slow
@pytest.mark.parametrize("latency", [1, 2, 3])
def test_the_delay_of_a_stage(latency):
    pipe = Watched(network(), stages=CUTS[5], loss=F.cross_entropy, optimizer=Spy, latency=latency)
    pipe.when = {}
    for x, target in batches(40):
        pipe.step(x, target)
    for j in range(5):
        delays = {pipe.when["B", j, n] - pipe.when["F", j, n] for n in range(8)}
        assert delays == {Schedule(5, latency).delay(j)} == {2 * latency * (4 - j)}


RUNS = {"petra": 2, "dsp": 2, "delayed": 2, "delayed-graph": 1, "exact-inverse": 2}


@pytest.mark.slow
@pytest.mark.parametrize("method", RUNS)
def test_f_runs_as_often_as_the_method_says(method):
    model = network()
    counts = dict.fromkeys((unit for unit in model if isinstance(unit, rd.Coupling)), 0)
    for unit in counts:
        unit.f.register_forward_hook(lambda *_, unit=unit: counts.update({unit: counts[unit] + 1}))
    make = lambda stage: torch.optim.SGD(stage.parameters(), lr=0.01)  # noqa: E731
    pipe = rd.Pipeline(model, stages=CUTS[5], loss=F.cross_entropy, optimizer=make, method=method)
    for x, target in batches(20):
        pipe.step(x, target)
    pipe.flush()
    assert set(counts.values()) == {20 * RUNS[method]}


def storages_like(shape: tuple[int, ...]) -> int:
    """Return the number of storages that hold a tensor of this shape."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (Tensor, nn.Parameter)]
    return len({t.untyped_storage().data_ptr() for t in tensors if t.shape == shape})


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, accumulate, copies",
    [
        ("petra", 1, 1),
        ("dsp", 1, 1),
        ("delayed", 1, 7),  # the one in use, and one for each update that is crossed
        ("delayed", 3, 3),
        ("delayed-graph", 1, 7),
        ("exact-inverse", 1, 7),
        ("approximate-input", 1, 7),
    ],
)
def test_copies_of_the_weights_counted_by_storage(method, accumulate, copies):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(37, 4) / 37)

        def forward(self, x):
            return torch.tanh(x @ self.weight.T @ self.weight)

    units = list(network())
    odd = Odd()
    units[2] = rd.Coupling(odd).double()
    make = lambda stage: torch.optim.SGD(stage.parameters(), lr=0.01)  # noqa: E731
    pipe = rd.Pipeline(
        units,
        stages=[2, 1, 3, 3, 3],
        loss=F.cross_entropy,
        optimizer=make,
        method=method,
        accumulate=accumulate,
    )
    for x, target in batches(21 if accumulate == 1 else 25):
        pipe.step(x, target)
    odd.weight.grad = None
    assert storages_like((37, 4)) == copies


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_is_held_between_ticks(method):
    model = network()
    make = lambda stage: torch.optim.SGD(stage.parameters(), lr=0.01)  # noqa: E731
    pipe = rd.Pipeline(model, stages=CUTS[5], loss=F.cross_entropy, optimizer=make, method=method)
    for x, target in batches(20):
        pipe.step(x, target)
    for j, stage in enumerate(pipe.stages):
        for unit in stage.units:
            values = [kept.value for kept in unit.kept.values() if kept.value is not None]
            graphs = [kept.run for kept in unit.kept.values() if kept.run is not None]
            reverses = isinstance(unit.module, rd.Coupling) and method in (
                "petra",
                "exact-inverse",
                "approximate-input",
            )
            assert len(values) == (0 if reverses else Schedule(5).delay(j)), unit.name
            assert len(graphs) == (Schedule(5).delay(j) if method == "delayed-graph" else 0)
            if reverses:
                assert not any(kept.record.state_dict()["buffers"] for kept in unit.kept.values())
    assert pipe.num_in_flight == Schedule(5).num_in_flight


def normed(seed: int = 0) -> rd.Chain:
    torch.manual_seed(seed)
    couplings = [rd.Coupling(ConvNorm(2)) for _ in range(3)]
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
    head = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    return rd.Chain([stem, rd.Split(dim=1), *couplings, rd.Fuse(dim=1), head]).double()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_are_committed_once_in_the_backward(method):
    """With frozen weights they equal the plain model's after as many batches as had a backward."""
    model = normed()
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 1, 4, 4, generator=generator).double() for _ in range(10)]
    pipe = spied(model, [1] * 7, method)
    for number, x in enumerate(data, 1):
        pipe.step(x, torch.tensor([0, 1, 2, 0]))
        for stage, unit in zip(pipe.stages, model, strict=True):
            runs_once = method == "delayed-graph" or stage.index == 6
            after = stage.index if runs_once else 12 - stage.index
            expected = max(0, number - after)
            for layer in unit.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    assert layer.num_batches_tracked is not None
                    assert int(layer.num_batches_tracked) == expected, (number, stage.index)
    pipe.flush()
    plain = normed()
    for x in data:
        run_plainly(plain, x)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(one, other, rtol=1e-10), name


def dropping() -> rd.Chain:
    torch.manual_seed(0)
    couplings = [rd.Coupling(MLP(4, dropout=0.5)) for _ in range(4)]
    return rd.Chain(
        [nn.Linear(5, 4), rd.Duplicate(), *couplings, rd.Fuse(), nn.Dropout(0.3), nn.Linear(8, 3)]
    ).double()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_a_function_of_seed_micro_batch_and_unit_and_not_of_the_cut(method):
    results = []
    for cut, latency in (([9], 1), ([3, 3, 3], 2), ([1] * 9, 1)):
        pipe = spied(dropping(), cut, method, latency=latency)
        state = torch.get_rng_state()
        for x, target in batches(5):
            pipe.step(x, target)
        pipe.flush()
        assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
        results.append(by_microbatch(pipe))
    for other in results[1:]:
        for one_batch, other_batch in zip(results[0], other, strict=True):
            for name, grad in one_batch.items():
                assert torch.allclose(grad, other_batch[name], rtol=1e-10, atol=1e-15), name


def test_dropout_differs_by_micro_batch_unit_and_seed():
    masks: dict[tuple[int, int], list[Tensor]] = {}
    for seed in (0, 1):
        model = dropping()
        for index, unit in enumerate(model):
            if isinstance(unit, rd.Coupling):
                unit.f.get_submodule("3").register_forward_hook(
                    lambda _, __, y, key=(seed, index): masks.setdefault(key, []).append(y == 0)
                )
        pipe = spied(model, 3, "petra", seed=seed)
        x, target = next(iter(batches(1)))
        for _ in range(3):
            pipe.step(x, target)
        pipe.flush()
    assert len(masks) == 8
    for runs in masks.values():  # three forwards and three recoveries, each pair with the same mask
        distinct = [m for i, m in enumerate(runs) if not any(torch.equal(m, o) for o in runs[:i])]
        assert len(runs) == 6 and len(distinct) == 3
    assert len({tuple(runs[0].flatten().tolist()) for runs in masks.values()}) == 8


def test_side_inputs_and_targets_travel_with_their_micro_batch():
    torch.manual_seed(0)
    couplings = [rd.Coupling(Attention(4), takes=("mask",)) for _ in range(4)]
    model = rd.Chain(
        [nn.Linear(5, 4), rd.Duplicate(), *couplings, rd.Fuse("mean"), Pool()]
    ).double()
    plain = copy.deepcopy(model)
    pipe = spied(model, 4)
    data = []
    for i in range(8):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(3, 6 + i % 2, 5, generator=generator).double()  # shapes change, too
        mask = torch.rand(6 + i % 2, 6 + i % 2, generator=generator).double()
        data.append((x, mask, torch.randint(4, (3,), generator=generator)))
        pipe.step(x, data[-1][2], mask=mask)
    pipe.flush()
    for (x, mask, target), grads in zip(data, by_microbatch(pipe), strict=True):
        plain.zero_grad()
        F.cross_entropy(run_plainly(plain, x, mask=mask), target).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None, name
            assert torch.allclose(grads[name], parameter.grad, rtol=1e-10, atol=1e-15), name


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(1)


def test_evaluation_at_any_time_uses_the_weights_of_now_and_disturbs_nothing():
    model, other = normed(), normed()
    pipes = [
        rd.Pipeline(m, stages=4, loss=F.cross_entropy, optimizer=SGD, seed=0)
        for m in (model, other)
    ]
    x, target = torch.randn(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0])
    assert pipes[0].evaluate(x).shape == (4, 3), "before any step, too"
    for _ in range(9):
        pipes[0].step(x, target)
        logits = pipes[0].evaluate(x)
        assert all(module.training for module in model.modules())
        assert torch.equal(logits, copy.deepcopy(model).eval()(x))
        pipes[1].step(x, target)
    for (name, one), two in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


def SGD(stage):
    return torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)


def test_autocast_of_a_micro_batch_is_that_of_its_step():
    torch.manual_seed(0)
    model = rd.Chain(
        [
            nn.Linear(5, 8),
            rd.Duplicate(),
            *(rd.Coupling(MLP(8)) for _ in range(4)),
            rd.Fuse(),
            nn.Linear(16, 3),
        ]
    )
    pipe = rd.Pipeline(model, stages=4, loss=F.cross_entropy, optimizer=SGD)
    phase = []
    for unit in model:
        if isinstance(unit, rd.Coupling):
            unit.f.get_submodule("1").register_forward_hook(lambda _, __, y: phase.append(y.dtype))
    for i in range(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            pipe.step(torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    pipe.flush()
    assert len(phase) == 8 * 4 * 2 + 4  # and once to learn which weights autocast casts
    assert phase.count(torch.bfloat16) - 4 == phase.count(torch.float32) == 32


SEEN: dict[str, list[bool]] = {"pull-back": [], "update": []}  # whether autocast was on


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert torch.is_autocast_enabled("cpu")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        SEEN["pull-back"].append(torch.is_autocast_enabled("cpu"))
        return grad


class Noting(torch.optim.SGD):
    def step(self, closure=None):
        SEEN["update"].append(torch.is_autocast_enabled("cpu"))
        return super().step(closure)


class Layer(nn.Linear):
    def forward(self, x):
        return Noted.apply(super().forward(x))


def test_gradients_and_updates_come_behind_autocast():
    pipe = rd.Pipeline(
        rd.Chain(
            [
                Layer(5, 16),
                rd.Split(),
                *(rd.Coupling(Layer(8, 8)) for _ in range(2)),
                rd.Fuse(),
                nn.Linear(16, 3),
            ]
        ),
        stages=3,
        loss=F.cross_entropy,
        optimizer=lambda stage: Noting(stage.parameters(), lr=0.1),
    )
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(6):
            pipe.step(torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_cache_enabled()
        with pytest.raises(RuntimeError, match="4x6"):
            pipe.step(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    for states in SEEN.values():
        assert states
        assert not any(states)


def test_the_grid_in_a_pipeline_equals_a_chain_on_the_grid():
    model = network().float()
    plain = rd.Chain(copy.deepcopy(list(model)), backward="store", arithmetic="fixed")
    pipe = spied(model, CUTS[10], arithmetic="fixed")
    data = [(x.float(), target) for x, target in batches(6)]
    for x, target in data:
        pipe.step(x, target)
    pipe.flush()
    for (x, target), grads in zip(data, by_microbatch(pipe), strict=True):
        plain.zero_grad()
        F.cross_entropy(plain(x), target).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None, name
            assert torch.equal(grads[name], parameter.grad), name


class Shift(nn.Module):
    """The gradients of its input and of its weight are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, 5))

    def forward(self, x):
        return x + self.shift


def test_a_message_is_not_changed_by_clipping():
    torch.manual_seed(0)
    units = [nn.Linear(5, 5), Shift(), nn.Linear(5, 3)]
    sent = []
    pipe = rd.Pipeline(
        units,
        stages=3,
        loss=F.mse_loss,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1),
        clip_norm=1e-6,
    )
    deliver = pipe.transport.deliver

    def noting(direction, stage, message):
        if direction == "down":
            sent.append((message.grads[0], message.grads[0].clone()))
        deliver(direction, stage, message)

    pipe.transport.deliver = noting  # type: ignore[method-assign]
    for _ in range(6):
        pipe.step(torch.randn(4, 5), torch.randn(4, 3))
    assert len(sent) == 7 and all(torch.equal(now, then) for now, then in sent)


def small(*units, **options):
    defaults: dict[str, Any] = {
        "stages": "auto",
        "loss": F.mse_loss,
        "optimizer": lambda stage: torch.optim.SGD(stage.parameters(), lr=0.05),
        "seed": 0,
    }
    return rd.Pipeline(list(units), **(defaults | options))


def pairs(number, width=4):
    torch.manual_seed(1)
    return [(torch.randn(5, width).double(), torch.randn(5, 3).double()) for _ in range(number)]


class Fourier(nn.Linear):
    def forward(self, x):
        return torch.fft.fft(super().forward(x))


class Magnitude(nn.Linear):
    def forward(self, z):
        return super().forward(z.abs())


def test_gradients_flow_through_complex_numbers():
    torch.manual_seed(0)
    units = [Fourier(4, 4).double(), Magnitude(4, 3).double()]
    plain = copy.deepcopy(nn.Sequential(*units))
    pipe, optimizer = small(*units, stages=1), torch.optim.SGD(plain.parameters(), lr=0.05)
    for x, target in pairs(5):
        pipe.step(x, target)
        optimizer.zero_grad()
        F.mse_loss(plain(x), target).backward()
        optimizer.step()
    for one, other in zip(nn.Sequential(*units).parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, target: (output > target).sum(), "of torch.int64, has none"),
        (lambda output, target: F.mse_loss(output.detach(), target), "must have a gradient"),
        (lambda output, target: F.mse_loss(output, target) * 1j, "must be a real number"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss, said):
    with pytest.raises(rd.UnitError, match=f"loss, micro-batch 0: .* {said}"):
        small(nn.Linear(4, 3).double(), loss=loss).step(*pairs(1)[0])


class WithTable(nn.Module):
    """Returns one of its weights, as a table of positions might be."""

    def __init__(self, copies):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 3))
        self.copies = copies

    def forward(self, x):
        return self.linear(x), self.table.clone() if self.copies else self.table[:]


class ByTable(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0]) @ pair[1]


@pytest.mark.parametrize("method", ["petra", "delayed", "delayed-graph"])
def test_a_weight_that_is_handed_on_is_that_of_the_forward(method):
    losses = []
    for copies in (False, True):
        torch.manual_seed(0)
        units = [WithTable(copies), ByTable(4, 4), nn.Linear(3, 3)]
        pipe = small(*(unit.double() for unit in units), method=method)
        ticks = [pipe.step(x, target) for x, target in pairs(12)]
        losses.append([float(tick.loss) for tick in ticks if tick.loss is not None])
    assert losses[0] == losses[1]


def test_parameters_that_the_optimizer_has_not_count_for_nothing():
    weights = []
    for frozen in (False, True):
        torch.manual_seed(0)
        units = [nn.Linear(4, 4).double(), nn.Linear(4, 3).double()]
        units[0].requires_grad_(not frozen)
        pipe = small(
            *units,
            stages=1,
            clip_norm=0.1,
            accumulate=2,
            optimizer=lambda stage: torch.optim.SGD(stage.get_submodule("1").parameters(), lr=1.0),
        )
        for x, target in pairs(6):
            pipe.step(x, target)
        assert units[0].weight.grad is None
        weights.append(units[1].weight.detach().clone())
    assert torch.equal(weights[0], weights[1])


def test_a_stage_that_was_frozen_cannot_be_trained():
    first = nn.Linear(4, 4).double().requires_grad_(False)
    pipe = small(first, nn.Linear(4, 3).double())
    pipe.step(*pairs(1)[0])
    first.requires_grad_()
    with pytest.raises(rd.UnitError, match="stage 0 had nothing to train when"):
        pipe.flush()


def test_hooks_that_would_not_be_called_are_refused():
    unit = nn.Linear(4, 3)
    unit.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(rd.UnitError, match=r"unit 0.* has a hook for its gradient"):
        small(unit)
    unit = nn.Linear(4, 3)
    unit.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(rd.UnitError, match="register_step_pre_hook"):
        small(unit)
    coupling = rd.Coupling(nn.Linear(4, 4))
    coupling.register_forward_hook(lambda *_: None)
    with pytest.raises(rd.UnitError, match="has hooks, which a pipeline would not call"):
        small(rd.Duplicate(), coupling, rd.Fuse())

    class Halved(rd.Coupling):
        def forward(self, streams, /, **side):
            return super().forward(streams)

    with pytest.raises(rd.UnitError, match="a forward of its own"):
        small(rd.Duplicate(), Halved(nn.Linear(4, 4)), rd.Fuse())


def test_rates_are_the_optimizers_own_without_a_function_of_them():
    torch.manual_seed(0)
    units = [nn.Linear(4, 4).double(), nn.Linear(4, 3).double()]
    pipe = small(*units)
    rates = []
    pipe.stages[1].optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    optimizer = pipe.stages[1].optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for x, target in pairs(3):
        pipe.step(x, target)
        if rates:
            scheduler.step()
    optimizer.param_groups[0]["lr"] = 0.1
    pipe.step(*pairs(1)[0])
    assert rates == [0.05, 0.025, 0.1]  # in the first tick nothing comes back


def test_sparse_gradients_and_lbfgs_are_refused():
    with pytest.raises(TypeError, match="LBFGS"):
        small(nn.Linear(4, 3), optimizer=lambda stage: torch.optim.LBFGS(stage.parameters()))
    pipe = small(nn.Embedding(4, 3, sparse=True), stages=1)
    with pytest.raises(rd.UnitError, match=r"unit 0.* is sparse"):
        pipe.step(torch.tensor([1, 2]), torch.randn(2, 3))


@pytest.mark.parametrize("stages", [2.0, None])
def test_stages_must_be_whole(stages):
    with pytest.raises(TypeError, match="stages must be a whole number"):
        small(nn.Linear(4, 4), nn.Linear(4, 3), stages=stages)


def test_updates_go_on_after_accumulate_was_lowered():
    pipe = small(nn.Linear(4, 3).double(), accumulate=3)
    batches = pairs(4)
    for x, target in batches[:2]:
        pipe.step(x, target)
    pipe.accumulate = 1
    for x, target in batches[2:]:
        pipe.step(x, target)
    assert pipe.stages[0].num_updates == 2
