"""Plans for networks of `rd.make_reversible`: budgets are kept, and gradients are as promised."""

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budgets import predict
from support.compressed import follow
from support.oracle import gradients, weigh, worst_error
from support.pretrained import batch, make
from support.processes.launch import launch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd
from redivider.budget.blocks import measure_blocks
from redivider.budget.planner import cheapest, measure_step
from redivider.budget.problem import find_least
from redivider.convert.reversible import set_strategies, strategies_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUM_BUDGETS = 30
NUM_DRAWN = 12
WIDTH = 16


class Block(nn.Module):
    """A residual block that draws random numbers, takes a scale, and may return more."""

    def __init__(self, width=WIDTH, dropout=0.1, returns_tuple=False, inner=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, inner * width), nn.Linear(inner * width, width)
        self.dropout, self.returns_tuple = nn.Dropout(dropout), returns_tuple

    def forward(self, x, scale=None):
        hidden = torch.tanh(self.first(self.norm(x)))
        y = self.dropout(self.second(hidden))
        y = x + (y if scale is None else y * scale)
        return (y, hidden.mean(), None) if self.returns_tuple else y


class Network(nn.Module):
    """Blocks of several kinds, with much between some of them."""

    def __init__(self, depth=6, between=True, **options):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
        kinds = [options, {**options, "inner": 1}]
        self.layers = nn.ModuleList([Block(**kinds[index % 2]) for index in range(depth)])
        wide = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
        self.between = wide if between else nn.Identity()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 30))

    def forward(self, x, **side):
        x = self.stem(x)
        aside = []
        for index, layer in enumerate(self.layers):
            x = layer(self.between(x) if index == 3 else x, **side)
            if isinstance(x, tuple):
                x, other, _ = x
                aside.append(other)
        return self.head(x) + (sum(aside) if aside else 0)


def network(dtype=torch.float32, **options) -> Any:
    torch.manual_seed(1)
    return rd.make_reversible(Network(**options).to(dtype), blocks="layers")


def two_lists():
    torch.manual_seed(1)
    model = nn.Sequential(Network(4), nn.Linear(30, 4), Network(2, between=False))
    for name in ("0.layers", "2.layers"):
        rd.make_reversible(model, blocks=name)
    return model


def partly_frozen():
    model = network()
    for module in (model.stem, model.layers[0], model.layers[4]):
        module.requires_grad_(False)
    return model


def inputs(dtype=torch.float32):
    return torch.randn(32, 8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


def loss_of(y):
    return F.cross_entropy(y.flatten(0, -2), torch.zeros(y[..., 0].numel(), dtype=torch.long))


def loss_in(output):
    return output.loss


CASES: dict[str, Any] = {
    "network": (network, loss_of, {}),
    "tuples": (lambda: network(returns_tuple=True), loss_of, {}),
    "arguments": (network, loss_of, {"scale": torch.full((WIDTH,), 0.5)}),
    "no dropout": (lambda: network(dropout=0.0, between=False), loss_of, {}),
    "frozen": (partly_frozen, loss_of, {}),
    "several lists": (two_lists, loss_of, {}),
}


def draw(problem, names, number):
    """Return choices by name, first one choice for all, then random ones."""
    rng = random.Random(number)
    fixed = number if number < 3 else None
    indices = [
        min(fixed, len(own) - 1) if fixed is not None else rng.randrange(len(own))
        for own in problem.units
    ]
    pairs = zip(problem.units, indices, strict=True)
    choices = dict(zip(names, (own[index].choice for own, index in pairs), strict=False))
    return indices, choices


def check_predictions(model, x, loss, side):
    names, problem = measure_blocks(model, x, side, loss)
    for number in range(NUM_DRAWN):
        indices, choices = draw(problem, names, number)
        predicted = predict(problem, indices)
        measured = measure_step(model, choices, x, loss, **side)
        assert measured <= predicted <= 1.1 * measured, choices


@pytest.mark.parametrize("case", CASES)
def test_no_plan_takes_more_than_predicted(case):
    make_model, loss, side = CASES[case]
    check_predictions(make_model(), inputs(), loss, side)


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Gemma3Text", "Bert", "ViT"])
def test_no_plan_of_transformers_takes_more_than_predicted(family):
    pytest.importorskip("transformers")
    check_predictions(rd.make_reversible(make(family).train()), None, loss_in, batch(family))


def test_thirty_budgets():
    """No step of a GPT-2 exceeds its budget, and a larger budget never means more FLOPs."""
    pytest.importorskip("transformers")
    model, side = rd.make_reversible(make("GPT2", n_layer=6).train()), batch("GPT2")
    names, problem = measure_blocks(model, None, side, loss_in)
    least = find_least(problem)
    most = predict(problem, [0] * len(problem.units))
    assert least < most / 2
    with FlopCounterMode(display=False) as counter:
        measure_step(model, "store", None, loss_in, **side)
    work = counter.get_total_flops()
    costs, plans = [], set[str]()
    for step in range(NUM_BUDGETS):
        budget = least + step * (most - least) // (NUM_BUDGETS - 1)
        indices = cheapest(problem, budget)
        assert indices is not None
        options = [own[index] for own, index in zip(problem.units, indices, strict=True)]
        choices = dict(zip(names, (option.choice for option in options), strict=False))
        plans |= {*choices.values()}
        assert measure_step(model, choices, None, loss_in, **side) <= budget
        costs.append(sum(option.cost for option in options))
        if step % 10 == 0:  # costs are the FLOPs of real steps
            with FlopCounterMode(display=False) as counter:
                measure_step(model, choices, None, loss_in, **side)
            assert counter.get_total_flops() - work == costs[-1]
    assert all(more <= less for less, more in pairwise(costs))
    assert costs[-1] == 0 and plans == {"store", "checkpoint", "compress"}


MIXED = ["store", "compress", "checkpoint", "compress", "store", "compress"]


def by_name(choices):
    return {f"layers.{index}": choice for index, choice in enumerate(choices)}


def train(model, dtype=torch.float64):
    torch.manual_seed(5)
    model.zero_grad()
    weigh(model(inputs(dtype))).backward()
    return gradients(model)


@pytest.mark.parametrize("options", [{}, {"returns_tuple": True}])
def test_gradients_of_stored_and_checkpointed_blocks_are_those_of_the_network(options):
    model = network(torch.float64, **options)
    plain = rd.make_plain(copy.deepcopy(model))
    for choices in (["store"] * 6, ["checkpoint"] * 6, ["store", "checkpoint"] * 3):
        set_strategies(model, by_name(choices))
        assert worst_error(train(model), train(plain)) <= 1e-14


def test_compressed_blocks_of_a_plan_share_a_tape():
    model = network(torch.float64, between=False)
    reference = rd.make_plain(copy.deepcopy(model))
    follow([reference.layers[index] for index in (1, 3, 5)], 2)
    set_strategies(model, by_name(MIXED))
    assert worst_error(train(model), train(reference)) <= 1e-12
    exact = rd.make_plain(copy.deepcopy(model))
    assert worst_error(train(model), train(exact)) > 1e-4  # the codes matter


@settings(deadline=None)
@given(st.lists(st.sampled_from(["store", "checkpoint", "compress"]), min_size=6, max_size=6))
def test_gradients_of_any_mix_are_those_that_its_choices_promise(choices):
    """Exact, but that compressed blocks run at inputs of two bits."""
    model = network(torch.float64, between=False)
    reference = rd.make_plain(copy.deepcopy(model))
    pairs = zip(reference.layers, choices, strict=True)
    follow([layer for layer, choice in pairs if choice == "compress"], 2)
    set_strategies(model, by_name(choices))
    assert worst_error(train(model), train(reference)) <= 1e-12


def middle(model, x, loss, side=None):
    _, problem = measure_blocks(model, x, side or {}, loss)
    return (2 * find_least(problem) + measure_step(model, "store", x, loss, **(side or {}))) // 3


def test_a_plan_changes_what_is_kept_and_nothing_else():
    pytest.importorskip("transformers")
    plain = make("GPT2")
    model = rd.make_reversible(copy.deepcopy(plain)).train()
    side = batch("GPT2")
    state = torch.get_rng_state()
    plan = rd.plan(model, memory=middle(model, None, loss_in, side), **side)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())
    assert set(strategies_of(model).values()) == {"compress"}
    assert plan.measured <= plan.predicted <= plan.memory
    assert len(plan) == 4 and len(set(plan)) > 1
    assert plan.apply() is model
    assert [*strategies_of(model).values()] == [*plan]
    assert plan.units[-1].name == "the head and the loss"

    def logits(net):
        with torch.no_grad():
            return net.eval()(side["input_ids"]).logits

    assert torch.equal(logits(model), logits(plain))
    assert list(model.state_dict()) == list(plain.state_dict())
    other = copy.deepcopy(model.train())
    assert strategies_of(other) == strategies_of(model)
    outputs = []
    for net in (plain.train(), other):
        torch.manual_seed(0)
        outputs.append(net(**side).loss)
    assert torch.equal(*outputs)
    assert set(strategies_of(rd.make_reversible(rd.make_plain(other))).values()) == {"compress"}
    assert [*strategies_of(model).values()] == [*plan]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")  # the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_plan_of_compiled_blocks():
    model = network(dropout=0.0)
    plain = rd.make_plain(copy.deepcopy(model))
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    budget = middle(model, inputs(), loss_of)
    plan = rd.plan(model, inputs(), memory=budget, loss=loss_of)
    assert len(set(plan)) > 1 and plan.measured <= budget
    plan.apply()
    set_strategies(model, {n: "store" if s == "store" else "checkpoint"
                           for n, s in strategies_of(model).items()})  # fmt: skip
    assert worst_error(train(model, torch.float32), train(plain, torch.float32)) <= 1e-5


def test_a_plan_under_autocast():
    model = network()
    with torch.autocast("cpu", torch.float16):
        check_predictions(model, inputs(), loss_of, {})
        budget = middle(model, inputs(), loss_of)
        plan = rd.plan(model, inputs(), memory=budget, loss=loss_of)
    assert len(set(plan)) > 1 and plan.measured <= budget
    assert measure_step(model, "store", inputs(), loss_of) > measure_step_in_half(model)


def measure_step_in_half(model):
    with torch.autocast("cpu", torch.float16):
        return measure_step(model, "store", inputs(), loss_of)


def run(model, rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 4, 4, dtype=torch.float64, generator=generator)
    torch.manual_seed(10 + rank)
    return weigh(model(x))


def expected(plan):
    model = network(torch.float64)
    set_strategies(model, dict(zip(strategies_of(model), plan, strict=True)))
    for rank in range(2):
        (run(model, rank) / 2).backward()
    return gradients(model)


def planned():
    model, x = network(torch.float64), inputs(torch.float64)
    return model, rd.plan(model, x, memory=middle(model, x, loss_of), loss=loss_of)


def replicated(rank: int) -> tuple[float, str]:
    model, plan = planned()
    wrapped = DistributedDataParallel(model)
    assert plan.apply(wrapped) is wrapped
    for _ in range(2):
        wrapped.zero_grad()
        run(wrapped, rank).backward()
    with pytest.raises(ValueError) as error:
        rd.plan(wrapped, inputs(torch.float64), memory="1GiB")
    return worst_error(gradients(model), expected(plan)), str(error.value)


def sharded(rank: int) -> tuple[float, str]:
    model, plan = planned()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    plan.apply()
    for _ in range(2):
        model.zero_grad()
        run(model, rank).backward()
    grads = {
        name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        for name, param in model.named_parameters()
    }
    with pytest.raises(ValueError) as error:
        rd.plan(model, inputs(torch.float64), memory="1GiB")
    return worst_error(grads, expected(plan)), str(error.value)


@pytest.mark.parametrize("function", [replicated, sharded])
def test_a_plan_made_before_the_model_is_wrapped(function, tmp_path):
    for error, message in launch(function, tmp_path):
        assert error <= 1e-11
        assert "before DDP or FSDP wraps it" in message
