"""Plans on a GPU: the peak of the allocator stays within the budget."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.budgets import smallest_budget
from support.networks import MLP
from torch import nn

import redivider as rd
from redivider.budget.blocks import measure_blocks
from redivider.budget.planner import measure_step
from redivider.budget.problem import find_least

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler's own
]

NUM_BUDGETS = 6


def vit():
    model = rd.create_model("rev_vit_small", num_classes=100, device="cuda")
    return model, torch.randn(16, 3, 224, 224, device="cuda")


def gpt():
    model = rd.create_model("rev_gpt_small", vocabulary=50257, context=512, device="cuda")
    return model, torch.randint(50257, (4, 512), device="cuda")


def swin():
    model = rd.create_model("rev_swin_tiny", num_classes=100, device="cuda")
    return model, torch.randn(16, 3, 224, 224, device="cuda")


def revnet():
    model = rd.create_model("revnet50", num_classes=100, image_size=224, device="cuda")
    return model, torch.randn(8, 3, 224, 224, device="cuda")


def loss_of(y):
    classes = y.shape[-1]
    return F.cross_entropy(
        y.reshape(-1, classes).float(), torch.zeros_like(y[..., 0]).long().flatten()
    )


def peak_of_step(model, forward) -> int:
    """Return the bytes that a step adds at its peak, if gradients of weights go as they come.

    One of them at a time may be copied before it goes, and is left out.
    """

    def drop(weight):
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(drop) for weight in model.parameters()]
    torch.clear_autocast_cache()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward().backward()
    peak = torch.cuda.max_memory_allocated() - before
    for hook in hooks:
        hook.remove()
    return peak - max(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [vit, gpt, swin, revnet])
def test_budgets_are_kept(make, autocast):
    model, x = make()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        least = smallest_budget(model, x, loss=loss_of, unit="")
        most = measure_step(model, "store", x, loss_of)
        for step in range(NUM_BUDGETS):
            budget = least + step * (most - least) // (NUM_BUDGETS - 1)
            plan = rd.plan(model, x, memory=budget, loss=loss_of)
            print(plan.memory, plan.predicted, plan.measured, plan.cost, plan.note)
            plan.apply()
            assert peak_of_step(model, lambda: loss_of(model(x))) <= budget


def test_a_training_step_stays_within_the_budget():
    """As a user sees it: all that is allocated, with weights and gradients."""
    model, x = vit()
    most = measure_step(model, "store", x, loss_of)
    plan = rd.plan(model, x, memory=most // 2, loss=loss_of)
    plan.apply()
    loss_of(model(x)).backward()  # the gradients are there from now on
    del plan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model(x))
    loss.backward()
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in model)  # until it is added
    assert torch.cuda.max_memory_allocated() - before <= most // 2 + largest


def test_gradients_are_those_of_store():
    model, x = vit()
    model.double()
    x = x.double()
    most = measure_step(model, "store", x, loss_of)
    plan = rd.plan(model, x, memory=most // 2, loss=loss_of)
    grads = []
    for backward in ("store", plan):
        model.backward = backward
        loss_of(model(x)).backward()
        grads.append([param.grad for param in model.parameters()])
        model.zero_grad()
    for true, grad in zip(*grads, strict=True):
        assert (grad - true).norm() <= 1e-10 * true.norm().clamp(min=1e-3)


def test_compiled_and_captured():
    model, x = vit()
    model.compile(dynamic=False)
    most = measure_step(model, "store", x, loss_of)
    rd.plan(model, x, memory=most // 2, loss=loss_of, capture=True).apply()

    def step(x):
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    assert rd.capture(step, (x,))(x).isfinite()


def gpt2(**options) -> Any:
    """Return a GPT-2 of transformers, reversible, and the keywords of a step."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_positions=512, **options)
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(config).train()
        tokens = torch.randint(config.vocab_size, (4, 512))
    return rd.make_reversible(model), {"input_ids": tokens, "labels": tokens}


def loss_in(output):
    return output.loss


@pytest.mark.parametrize("autocast", [False, True])
def test_budgets_of_a_reversible_network_are_kept(autocast):
    model, side = gpt2()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        least = smallest_budget(model, unit="", **side)
        most = measure_step(model, "store", None, loss_in, **side)
        for step in range(NUM_BUDGETS):
            budget = least + step * (most - least) // (NUM_BUDGETS - 1)
            plan = rd.plan(model, memory=budget, **side)
            print(plan.memory, plan.predicted, plan.measured, plan.cost, plan.note, *plan)
            plan.apply()
            assert peak_of_step(model, lambda: model(**side).loss) <= budget


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), MLP(64)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_of_a_planned_network(compiled):
    """Under autocast, with blocks compiled or not, it trains as by eager steps."""
    torch.manual_seed(0)
    body = nn.Sequential(*(Block() for _ in range(6)))
    model: Any = nn.Sequential(nn.Linear(8, 64), body, nn.Linear(64, 5)).cuda()
    rd.make_reversible(model, blocks="1")
    x = torch.randn(8192, 8, device="cuda")
    other = copy.deepcopy(model)
    if compiled:
        for block in model[1]:
            block.compile(dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        least = find_least(measure_blocks(model, x, {}, loss_of)[1])
        most = measure_step(model, "store", x, loss_of)
        plan = rd.plan(model, x, memory=(least + 2 * most) // 3, loss=loss_of, capture=True)
    assert len({*plan}) > 1 and plan.measured <= plan.memory
    losses = []
    for net in (model, other):
        plan.apply(net)
        run = make_step(net)
        run = rd.capture(run, (x,)) if net is model else run
        losses.append(torch.stack([run(x).detach() for _ in range(5)]))
    assert torch.allclose(losses[0], losses[1], rtol=2e-2)
    assert losses[0][-1] < 0.9 * losses[0][0]


def make_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss

    return step
