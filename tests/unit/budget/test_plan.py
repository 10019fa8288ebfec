"""Plans: what they print, save and refuse, and what they leave as it was."""

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.budgets import smallest_budget
from torch import nn

import redivider as rd
from redivider.budget import measure as measuring
from redivider.budget import planner as planning
from redivider.budget.measure import measure
from redivider.budget.planner import measure_step
from redivider.budget.problem import find_least
from redivider.budget.trial import Part
from redivider.budget.unit import choices_of, measure_part
from redivider.checks.size import parse_bytes


def loss_of(y):
    return y.square().sum()


def make(depth=4, **options):
    torch.manual_seed(0)
    units = [nn.Linear(6, 32), rd.Duplicate()]
    units += [rd.Coupling(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()))
              for _ in range(depth)]  # fmt: skip
    return rd.Chain([*units, rd.Fuse("concat"), nn.Linear(64, 5)], **options), torch.randn(64, 6)


@pytest.fixture(scope="module")
def planned():
    """A chain, its input, and a plan in the middle between the least memory and all of it."""
    model, x = make()
    least = find_least(measure(model, x, {}, loss_of))
    most = measure_step(model, "store", x, loss_of)
    return model, x, rd.plan(model, x, memory=(least + most) // 2, loss=loss_of)


def test_a_plan_is_a_backward(planned):
    model, x, plan = planned
    assert model.backward == "reverse"
    assert len(plan) == len(model) and list(plan) == [*plan.choices]
    assert {"store", "reverse"} <= {*plan}
    chain = rd.Chain(list(model), backward=plan)
    assert chain.backward == plan.choices
    model.backward = "store"
    expected = torch.autograd.grad(loss_of(model(x)), [*model.parameters()])
    grads = torch.autograd.grad(loss_of(chain(x)), [*chain.parameters()])
    model.backward = "reverse"
    for grad, true in zip(grads, expected, strict=True):
        assert torch.allclose(grad, true, atol=1e-5)


def test_it_is_within_its_budget(planned):
    model, x, plan = planned
    assert measure_step(model, plan.choices, x, loss_of) == plan.measured <= plan.memory
    assert plan.measured <= plan.predicted <= plan.memory
    assert plan.predicted == max(unit.peak for unit in plan.units)
    assert plan.cost == sum(unit.cost for unit in plan.units) > 0


def test_it_prints_every_unit(planned):
    _, _, plan = planned
    first, *lines, last = str(plan).splitlines()
    assert first.split() == ["unit", "choice", "held", "added", "FLOPs", "peak"]
    assert len(lines) == len(plan) + 1
    assert "reverse" in lines[2] and lines[2].startswith("unit 2, Coupling(Sequential)")
    assert "measured" in last and "predicted" in last and "allowed" in last
    assert repr(plan).startswith("<Plan of 8 units")


def test_it_is_saved_and_loaded(planned, tmp_path):
    model, _, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = rd.Plan.load(tmp_path / "plan.json")
    assert str(loaded) == str(plan) and loaded.units == plan.units
    with pytest.raises(ValueError, match=r"plan\.apply\(model\)"):
        loaded.apply()
    chain = rd.Chain(list(model))
    assert loaded.apply(chain) is chain and chain.backward == plan.choices
    with pytest.raises(ValueError, match="it has 8 units, and here are 9"):
        loaded.apply(make(5)[0])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda values: values.update(units=[{"name": "x"}]), "missing"),
        (lambda values: values.update(units=[]), "no units"),
        (lambda values: values.update(memory="6GiB"), "memory must be int, got '6GiB'"),
        (lambda values: values.update(measured=None), "measured must be int"),
        (lambda values: values["units"][1].update(held="1"), "held must be int"),
        (lambda values: values["units"][1].update(cost="1"), "cost must be float"),
        (lambda values: values["units"][1].update(choice="stor"), "did you mean 'store'"),
        (lambda values: values["units"][1].update(name=3), "name must be str"),
        (lambda values: values.update(more=3), "more"),
        (lambda values: values.update(measured=-1), "measured must be at least 0"),
        (lambda values: values["units"][1].update(cost=math.nan), "cost must be at least 0"),
        (lambda values: values.pop("units"), "no units"),
    ],
)
def test_files_that_are_no_plans(planned, tmp_path, change, message):
    path = tmp_path / "plan.json"
    planned[2].save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"is not a plan, as plan.save writes it: .*{message}"):
        rd.Plan.load(path)


def test_a_file_is_written_as_a_whole(planned, tmp_path, monkeypatch):
    planned[2].save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_text()

    def fail(self, text, *args, **options):
        with self.open("w") as file:
            file.write(text[:20])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="full"):
        planned[2].save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == before


def test_copies_and_pickles_do_not_include_the_model(planned):
    for other in (copy.deepcopy(planned[2]), pickle.loads(pickle.dumps(planned[2]))):
        assert other.units == planned[2].units and str(other) == str(planned[2])
        with pytest.raises(ValueError, match=r"plan\.apply\(model\)"):
            other.apply()
    assert len(pickle.dumps(planned[2])) < 5000


@pytest.mark.slow
def test_it_plots(planned, tmp_path):
    pytest.importorskip("matplotlib")
    planned[2].plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000


def test_a_budget_too_small_says_what_is_needed():
    model, x = make()
    least = smallest_budget(model, x, loss=loss_of, unit=r"unit \d")
    assert rd.plan(model, x, memory=least, loss=loss_of).measured == least
    assert least <= find_least(measure(model, x, {}, loss_of))
    with pytest.raises(ValueError, match=f"smallest budget is {least:,} bytes"):
        rd.plan(model, x, memory=least - 1, loss=loss_of)


def test_captured_steps_do_not_offload():
    model, x = make()
    part = Part(model[1], {}, model.arithmetic)
    choices = choices_of(part, is_cuda=True)
    assert "offload" in choices
    captured = replace(part, is_captured=True)
    assert choices_of(captured, is_cuda=True) == [own for own in choices if own != "offload"]
    assert choices_of(captured, is_cuda=False) == choices_of(part, is_cuda=False)
    whole = rd.plan(model, x, capture=True)
    assert list(whole) == list(rd.plan(model, x))


def test_all_of_the_memory_means_store():
    model, x = make()
    assert set(rd.plan(model, x)) <= {"store", "checkpoint"}  # what is free is enough
    assert rd.plan(model, x).cost == 0


@pytest.mark.slow
def test_a_plan_that_takes_too_much_is_made_again_for_less(monkeypatch):
    model, x = make()
    problem = measure(model, x, {}, loss_of)
    least, most = find_least(problem), measure_step(model, "store", x, loss_of)
    budget = (least + most) // 2
    monkeypatch.setattr(
        "redivider.budget.planner.measure_step", grown := Grown((most - least) // 4)
    )
    plan = rd.plan(model, x, memory=budget, loss=loss_of)
    assert grown.num_calls == 2 and "too much" in plan.note and plan.note in str(plan)
    assert plan.measured <= budget
    monkeypatch.setattr(planning, "measure_step", Grown(10 * most))
    with pytest.raises(ValueError, match="no plan fits"):
        rd.plan(model, x, memory=budget)


def test_the_plan_that_takes_least_is_the_last_resort(monkeypatch):
    model, x = make()
    least = find_least(measure(model, x, {}, loss_of))
    budget = (least + measure_step(model, "store", x, loss_of)) // 2
    takes = iter([budget + 1, budget + 1, budget])
    monkeypatch.setattr(planning, "measure_step", lambda *args, **side: next(takes))
    plan = rd.plan(model, x, memory=budget, loss=loss_of)
    assert plan.predicted == least and "made again" in plan.note


class Grown:
    """A step that takes more bytes than measured."""

    def __init__(self, more: int) -> None:
        self.more, self.num_calls = more, 0

    def __call__(self, model, backward, x, loss, **side):
        self.num_calls += 1
        return measure_step(model, backward, x, loss, **side) + self.more


def test_equal_units_are_measured_once(monkeypatch):
    measured = []
    original = measure_part

    def count(part, x, needs, timer):
        measured.append(part.module)
        return original(part, x, needs, timer)

    monkeypatch.setattr(measuring, "measure_part", count)
    model, x = make(6)
    measure(model, x, {}, loss_of)
    # The first coupling gets one tensor twice, and is like the others all the same.
    assert measured == [*list(model)[:3], *list(model)[-2:], loss_of]
    measured.clear()
    model[5].f[1] = nn.Linear(32, 32, bias=False)
    model[6].f.eval()
    measure(model, x, {}, loss_of)
    assert len(measured) == 8


def test_the_model_stays_as_it_was():
    units = [nn.Linear(6, 8), nn.BatchNorm1d(8), rd.Duplicate()]
    couplings = [
        rd.Coupling(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)))
        for _ in range(3)
    ]
    model = rd.Chain([*units, *couplings, rd.Fuse("add")], backward="checkpoint")
    x = torch.randn(5, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    plan = rd.plan(model, x, memory="1MiB")
    assert model.backward == "checkpoint" and model.check_every == 100
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    plan.apply()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_modules_in_evaluation_mode_frozen_units_and_keywords():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x, shift):
            return self.body(x) * shift

    couplings = [rd.Coupling(Shift(), takes=("shift",)) for _ in range(4)]
    model = rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *couplings, rd.Fuse("add")]).eval()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    shift, x = torch.randn(50, 8), torch.randn(50, 6)
    most = measure_step(model, "store", x, loss_of, shift=shift)
    plan = rd.plan(model, x, memory=most * 3 // 4, loss=loss_of, shift=shift)
    assert plan.measured <= most * 3 // 4 and not model.training


@pytest.mark.parametrize(
    "text, size",
    [
        (123, 123),
        ("123", 123),
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("6G", 6 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("500 MB", 500_000_000),
        ("2kb", 2000),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [0, -1, "", "GiB", "6 Gibs", "1.2.3", ".", 1.5, True, None, "-3", 2**63, "9" * 400],
)
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="memory"):
        parse_bytes(text)


def test_a_device_keeps_room_for_the_gradients_of_weights(planned, monkeypatch):
    """Without a limit, what is free is the limit."""
    model, x, _ = planned
    monkeypatch.setattr(planning, "_free_bytes", lambda device: 10**6)
    weights = sum(param.nbytes for param in model.parameters())
    assert rd.plan(model, x, loss=loss_of).memory == 10**6 - weights


def test_more_than_there_is(planned):
    model, x, _ = planned
    assert rd.plan(model, x, memory=2**63 - 2**12, loss=loss_of).cost == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")  # the compiler's own
@pytest.mark.parametrize("how", ["compiled", "autocast"])
def test_plans_of_compiled_units_and_under_autocast(how):
    model, x = make()
    if how == "compiled":
        model.compile(backend="aot_eager")
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        least = find_least(measure(model, x, {}, loss_of))
        most = measure_step(model, "store", x, loss_of)
        plan = rd.plan(model, x, memory=(least + most) // 2, loss=loss_of)
        grads = []
        for backward in ("store", plan):
            model.backward = backward
            grads.append(torch.autograd.grad(loss_of(model(x)), [*model.parameters()]))
    assert plan.measured <= plan.predicted <= plan.memory and len({*plan}) > 1
    for grad, true in zip(*grads, strict=True):
        assert (grad - true).norm() <= 1e-2 * true.norm()


def test_gradients_of_shared_weights_wait_for_the_lower_user():
    """The gradient of a head that shares its weight with an embedding is there all the while."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(500, 8), nn.Linear(8, 500)
    couplings = [rd.Coupling(nn.Linear(8, 8)) for _ in range(3)]
    model = rd.Chain([embedding, rd.Duplicate(), *couplings, rd.Fuse("add"), head])
    x = torch.randint(500, (2, 4))
    apart = rd.plan(model, x, memory="1GiB")
    head.weight = embedding.weight
    shared = rd.plan(model, x, memory="1GiB")
    assert shared.measured <= shared.predicted
    more = [own.peak - other.peak for own, other in zip(shared.units, apart.units, strict=True)]
    size = embedding.weight.nbytes
    assert more[0] == 2 * size and size // 2 < min(more[1:6]) <= max(more[1:6]) == size
    assert more[6:] == [0, 0]


def test_a_plan_on_a_gpu_leaves_some_of_the_budget_free(monkeypatch):
    """Steps differ a little there, so a step that takes all of the budget is planned again."""
    model, x = make()
    most = measure_step(model, "store", x, loss_of)
    budget = 2 * most
    peaks = iter([budget - budget // 200, most])
    monkeypatch.setattr(planning, "gpu_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(planning, "measure_step", lambda *_, **__: next(peaks))
    plan = rd.plan(model, x, memory=budget, loss=loss_of)
    assert plan.measured == most and plan.note.startswith("made again")


def test_a_loss_with_weights_of_its_own_and_a_frozen_chain():
    model, x = make()
    head = nn.Linear(5, 1)
    with pytest.raises(ValueError, match=r"no gradient: .* all of the model is frozen"):
        rd.plan(model.requires_grad_(False), x, memory=10**6, loss=lambda y: head(y).sum())


def test_what_is_no_loss_is_refused():
    model, x = make()
    loss: Any = "cross_entropy"
    with pytest.raises(TypeError, match=r"loss takes the output of the model, .* got str"):
        rd.plan(model, x, memory=10**9, loss=loss)
    with pytest.raises(ValueError, match=r"the loss has shape .*, and must be one number"):
        rd.plan(model, x, memory=10**9, loss=lambda y: y)
    with pytest.raises(ValueError, match="has no gradient: it is no tensor"):
        rd.plan(model, x, memory=10**9, loss=lambda y: y.sum().item())
