"""Plans on a GPU: the peak of the allocator stays within the budget."""

import pytest
import torch
import torch.nn.functional as F

import redivider as rd
from redivider.budget.measure import measure
from redivider.budget.plan import MARGIN, measure_step
from redivider.budget.solve import find_least

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [vit, gpt, swin, revnet])
def test_budgets_are_kept(make, autocast):
    model, x = make()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        least = int(find_least(measure(model, x, {}, loss_of)) / (1 - MARGIN)) + 1
        most = measure_step(model, "store", x, loss_of)
        for step in range(NUM_BUDGETS):
            budget = least + step * (most - least) // (NUM_BUDGETS - 1)
            plan = rd.plan(model, x, memory=budget, loss=loss_of)
            print(plan.memory, plan.predicted, plan.measured, plan.cost, plan.note)
            assert plan.measured <= budget


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
    rd.plan(model, x, memory=most // 2, loss=loss_of).apply()

    def step(x):
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    if "offload" not in model.backward:
        step = rd.capture(step, (x,))
    assert step(x).isfinite()
