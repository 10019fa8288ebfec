"""The compiled update: the optimizer's own step, to the last few bits."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.captured import network
from support.pipelines import batches, rate
from support.skips import skip_unless
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import redivider as rd
from redivider.pipeline.stages.compiled_update import CompiledUpdate

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: Adam(p, lr=0.1, weight_decay=0.01, fused=True),
    "adamw": lambda p: with_lists(AdamW(p, lr=0.1, fused=True)),
    "amsgrad": lambda p: AdamW(p, lr=0.1, amsgrad=True, maximize=True, fused=True),
    "muon": lambda p: fused_muon(p, weight_decay=0.1),
    "muon, plain": lambda p: fused_muon(p, nesterov=False, scale="spectral"),
    "muon, sgd": lambda p: fused_muon(p, rest="sgd", weight_decay=0.1),
}


def with_lists(optimizer):
    """Return an optimizer with a setting that is a list, as one that was read from a file has."""
    optimizer.param_groups[0]["betas"] = [0.8, 0.9]
    return optimizer


def fused_muon(params, **options):
    """Return Muon for a matrix, a vector and a filter, as on a GPU."""
    layers = nn.Linear(3, 4), nn.Conv1d(3, 2, 3)
    layers[0].weight, layers[0].bias, layers[1].weight = params
    layers[1].bias = None
    optimizer = rd.Muon(nn.ModuleList(layers), 0.1, **options)
    optimizer.param_groups[1]["fused"] = True
    return optimizer


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),  # the compiler's own
]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).double()) for shape in ((4, 3), (3,), (2, 3, 3))]


def fill_gradients(*lists):
    grads = [torch.randn_like(param) for param in lists[0]]
    for params in lists:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()


def same(one, other, bound):
    pairs = zip(one, other, strict=True)
    return all(torch.norm(a - b) <= bound * torch.norm(b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_the_optimizers_own_and_a_fault_changes_no_weight(optimizer):
    ours, theirs = parameters(), parameters()
    mine: Any = OPTIMIZERS[optimizer](ours)
    plain = OPTIMIZERS[optimizer](theirs)
    copies = {ours[0]: torch.zeros(4, 3, dtype=torch.bfloat16)}
    update = CompiledUpdate(backend="aot_eager")
    done = []
    # Adam counts its steps in float32, and here corrects its averages by powers in float32.
    bound = 1e-6 if optimizer in ("adam", "adamw", "amsgrad", "muon", "muon, plain") else 1e-12
    for number in range(5):
        fill_gradients(ours, theirs)
        for optim in (mine, plain):
            for group in optim.param_groups:
                group["lr"] = 0.1 / (1 + number)
        with torch.no_grad():
            done.append(update.step(mine, copies))
        if not done[-1]:
            mine.step()
        plain.step()
        assert same(ours, theirs, bound)
        if done[-1]:
            assert torch.equal(copies[ours[0]], ours[0].detach().bfloat16())
    # The first step makes the state, where there is one.
    assert done == [optimizer == "sgd", True, True, True, True]
    for a, b in zip(ours, theirs, strict=True):
        for name, value in plain.state[b].items():
            assert value is None or same([mine.state[a][name]], [value], bound)
    mine.found_inf = torch.ones(())
    for param in ours:
        param.grad = torch.full_like(param, torch.nan)
    before = copy.deepcopy(ours)
    with torch.no_grad():
        assert update.step(mine, copies)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


def test_what_it_cannot_do_is_left_to_the_optimizer():
    weights = parameters()
    fill_gradients(weights)
    update = CompiledUpdate(backend="aot_eager")
    hooked = SGD(weights, lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)

    class Own(SGD):
        pass

    others: list[Optimizer] = [hooked, Own(weights, lr=0.1), RMSprop(weights, lr=0.1)]
    on_the_host = Adam(weights, lr=0.1)  # a step counted on the host is no input of a graph
    on_the_host.step()
    for state in on_the_host.state.values():
        state["step"] = state["step"].to("meta")  # as good as another device
    before = copy.deepcopy(weights)
    assert not any(update.step(optimizer, {}) for optimizer in (*others, on_the_host))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_groups_alike_share_their_graphs():
    update = CompiledUpdate(backend="aot_eager")
    for _ in range(3):
        weights = parameters()
        fill_gradients(weights)
        with torch.no_grad():
            assert update.step(SGD(weights, lr=0.1), {})
    assert len(update._runs) == 1


class Dropped(nn.Module):
    """Gives its mask, scaled by a weight whose gradient shows the mask of the backward."""

    def __init__(self):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(32)), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.ones_like(x) * self.weight)


@pytest.mark.slow
def test_compiled_dropout_drops_the_same_in_both_runs():
    """With the default compiler, which draws its own random numbers; from the first run on."""
    skip_unless(lambda: torch.compile(torch.nn.functional.dropout)(torch.ones(3, 32)))
    first, second = Dropped(), Dropped()  # a junction, and the function of a coupling
    seen: dict[Dropped, list[Tensor]] = {first: [], second: []}

    class Seeing(SGD):
        def step(self, closure=None):
            for module in seen:
                if any(module.weight is p for p in self.param_groups[0]["params"]):
                    grad = module.weight.grad
                    assert grad is not None
                    seen[module].append(grad.clone())

    # The streams begin as (first mask, 0), so the coupling gives (second mask, first mask).
    units = [first, Beside(), rd.Coupling(Ignoring(second)), nn.Identity()]
    pipe = rd.Pipeline(
        rd.Chain(units),
        stages="auto",
        loss=lambda output, _: (output[0].sum() + output[1].sum(), [x.detach() for x in output]),
        optimizer=lambda stage: Seeing(stage.parameters(), lr=0.0),
    )
    pipe.compile(dynamic=False)
    ticks = [pipe.step(torch.zeros(3, 32), torch.zeros(3)) for _ in range(5)] + pipe.flush()
    outputs = [tick.aux for tick in ticks if tick.aux is not None]
    for module, stream in ((second, 0), (first, 1)):
        masks = [output[stream].sum(0) for output in outputs]
        assert len(masks) == len(seen[module]) == 5
        assert all(torch.equal(a, b) for a, b in zip(masks, seen[module], strict=True))
        assert not torch.equal(masks[0], masks[1])


class Beside(nn.Module):
    def forward(self, x):
        return x, torch.zeros_like(x)


class Ignoring(nn.Module):
    """Runs a module on zeros, so that its input gets a gradient of zero."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 0)


@pytest.mark.parametrize("accumulate, amp", [(1, True), (2, False)])
def test_a_compiled_pipeline_follows_the_plain_one(accumulate, amp):
    runs = []
    for compiled in (False, True):
        pipe = rd.Pipeline(
            network().float() if amp else network(),
            stages=3,
            loss=F.cross_entropy,
            optimizer=lambda stage: SGD(stage.parameters(), lr=0.05, momentum=0.9),
            lr_lambda=rate,
            accumulate=accumulate,
        )
        if compiled:
            pipe.compile(backend="aot_eager")
        losses = []
        for x, target in batches(12):
            # Not the precision that a flush outside of autocast would have.
            with torch.autocast("cpu", torch.float16, enabled=amp):
                tick = pipe.step(x.float() if amp else x, target)
            losses += [] if tick.loss is None else [tick.loss]
        num = counters["stats"]["unique_graphs"]
        losses += [tick.loss for tick in pipe.flush() if tick.loss is not None]
        runs.append(torch.stack(losses))
        if compiled:
            assert num and counters["stats"]["unique_graphs"] == num, "a flush compiles again"
            update = pipe.stages[0].compiled_update
            assert update is not None and update._runs
    assert torch.allclose(runs[0], runs[1], rtol=2e-2 if amp else 1e-10)


def test_a_compiled_stem_that_gives_one_tensor_twice():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Linear(5, 4), rd.Duplicate())
    chain = rd.Chain([stem, rd.Coupling(nn.Linear(4, 4)), rd.Fuse(), nn.Linear(8, 3)]).double()
    ends = []
    for compiled in (False, True):
        model = copy.deepcopy(chain)
        pipe = rd.Pipeline(
            model,
            stages=2,
            loss=F.cross_entropy,
            optimizer=lambda stage: SGD(stage.parameters(), lr=0.05),
        )
        if compiled:
            pipe.compile(backend="aot_eager", fullgraph=True)
        for x, target in batches(8):
            pipe.step(x, target)
        pipe.flush()
        ends.append([*model.parameters()])
    assert same(ends[0], ends[1], 1e-10)
