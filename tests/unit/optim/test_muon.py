"""Muon: its step against singular values in float64, and against torch's optimizers."""

import copy
import warnings

import pytest
import torch
from support.muon import Oracle, exact, set_grads
from support.networks import MLP
from torch import nn

import redivider as rd
from redivider.optim.muon import SCALES, memory_order, orthogonalise, split_parameters

SHAPES = {"wide": (5, 12), "tall": (12, 5), "square": (7, 7), "row": (1, 6), "column": (6, 1)}


def filters():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv1d(4, 40, 1), nn.Conv3d(4, 4, 3, groups=2))


def matrices(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(n, m, bias=False) for m, n in SHAPES.values()]
    return nn.Sequential(*layers, nn.Linear(12, 5)).to(dtype)  # two of one shape


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-11), (torch.float32, 2e-4)])
def test_the_iteration_is_that_of_the_singular_values(shape, dtype, error):
    torch.manual_seed(0)
    batch = torch.randn(3, *shape, dtype=dtype) * torch.tensor([1e-4, 1, 1e6], dtype=dtype).view(
        3, 1, 1
    )
    for one, matrix in zip(orthogonalise(batch), batch, strict=True):
        assert torch.allclose(one.double(), exact(matrix), atol=error)


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(20, 30, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, -2.2, 20, dtype=torch.float64)
    near = torch.linalg.svdvals(orthogonalise((u * values @ v)[None])[0])
    assert near.min() > 0.68 and near.max() < 1.21


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("make", [matrices, filters])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nesterov, momentum, decay", [(True, 0.95, 0.1), (False, 0.6, 0.0)])
def test_steps_follow_the_equations(make, scale, nesterov, momentum, decay):
    net = make()
    weights = [param for param in net.parameters() if param.ndim > 1]
    keywords = {"momentum": momentum, "nesterov": nesterov, "scale": scale}
    optimizer = rd.Muon(net, 0.02, weight_decay=decay, **keywords)
    oracle = Oracle(weights, 0.02, momentum, nesterov, decay, scale)
    for number in range(6):
        set_grads(weights, number)
        if number == 3:
            weights[1].grad = None
        optimizer.step()
        oracle.step([weight.grad for weight in weights])
    for weight, expected in zip(weights, oracle.weights, strict=True):
        assert torch.allclose(weight.double(), expected, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("scale, theirs", [("spectral", "original"), ("match_rms_adamw",) * 2])
def test_it_agrees_with_torch(scale, theirs):
    net, other = matrices(), matrices()
    params = [param for param in other.parameters() if param.ndim == 2]
    ours = rd.Muon(net, 0.02, weight_decay=0.1, scale=scale)
    reference = torch.optim.Muon(params, lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs)
    before = [param.detach().clone() for param in params]
    for number in range(5):
        for model in (net, other):
            set_grads([param for param in model.parameters() if param.ndim == 2], number)
        ours.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it computes in bf16, which this CPU may not know
            reference.step()
    mine = [param for param in net.parameters() if param.ndim == 2]
    for one, there, start in zip(mine, params, before, strict=True):
        assert (one - there).norm() <= 2e-2 * (there - start).norm()


def vectors():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Embedding(6, 4), nn.LayerNorm(4))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_vectors_alone_are_trained_by_the_rest(rest, fused):
    net, other = vectors(), vectors()
    optimizer = rd.Muon(net, 0.5, rest=rest, rest_lr=0.02, weight_decay=0.1 * (rest == "adamw"))
    optimizer.param_groups[1]["fused"] = fused
    reference: torch.optim.Optimizer
    if rest == "adamw":
        reference = torch.optim.AdamW(other.parameters(), lr=0.02, weight_decay=0.1, fused=fused)
    else:
        reference = torch.optim.SGD(
            other.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=fused
        )
    for number in range(5):
        for model in (net, other):
            set_grads(model.parameters(), number)
        optimizer.step()
        reference.step()
    for one, there in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, there)


def test_the_decay_of_a_rest_by_sgd_is_not_in_its_momentum():
    net = nn.LayerNorm(3, bias=False)
    optimizer = rd.Muon(net, 0.1, rest="sgd", weight_decay=0.5)
    for _ in range(4):
        net.weight.grad = torch.zeros(3)
        optimizer.step()
    assert torch.allclose(net.weight, torch.full((3,), 0.95**4))


def test_a_rest_of_which_some_have_no_momentum_yet():
    net, other = vectors(), vectors()
    for model, fused in ((net, True), (other, False)):
        optimizer = rd.Muon(model, 0.02, rest="sgd")
        optimizer.param_groups[1]["fused"] = fused
        params = list(model.parameters())
        for number in range(3):
            set_grads(params, number)
            if number == 0:
                params[0].grad = None
            optimizer.step()
    for one, there in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, there, atol=1e-7)


def test_weights_in_bf16():
    net = matrices(torch.bfloat16)
    optimizer = rd.Muon(net, 0.02)
    set_grads([param for param in net.parameters() if param.ndim == 2], 0)
    nn.init.zeros_(net[0].weight)  # what is small beside a weight in bf16 is rounded away
    optimizer.step()
    step = -net[0].weight.double() / (0.02 * SCALES["match_rms_adamw"](5, 12))
    assert torch.allclose(step, exact(net[0].weight.grad), atol=0.02)


def test_the_order_of_memory_does_not_matter():
    torch.manual_seed(0)
    one, other = (nn.Conv2d(6, 8, 3, bias=False).double() for _ in range(2))
    other.weight.data = one.weight.data.to(memory_format=torch.channels_last)
    optimizers = [rd.Muon(layer, 0.02, weight_decay=0.1) for layer in (one, other)]
    for number in range(3):
        for layer, optimizer in zip((one, other), optimizers, strict=True):
            set_grads(layer.parameters(), number)
            optimizer.step()
    assert torch.allclose(one.weight, other.weight, rtol=1e-12)
    assert other.weight.is_contiguous(memory_format=torch.channels_last)
    # A matrix is a view of either, so that a step copies no filter.
    for layer in (one, other):
        assert layer.weight.permute(memory_order(layer.weight)).is_contiguous()


def test_nothing_to_orthogonalise_and_nothing_else():
    for net in (nn.LayerNorm(3), nn.Linear(3, 3, bias=False)):
        optimizer = rd.Muon(net, 0.02)
        assert [len(group["params"]) for group in optimizer.param_groups] in ([0, 2], [1, 0])
        net(torch.randn(2, 3)).sum().backward()
        optimizer.step()


def test_a_fault_changes_nothing():
    for rest in ("adamw", "sgd"):
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        optimizer = rd.Muon(net, 0.02, rest=rest, weight_decay=0.1)
        optimizer.param_groups[1]["fused"] = True
        states = []
        for number, fault in enumerate((0.0, 1.0)):
            set_grads(net.parameters(), number)
            if fault:
                for param in net.parameters():
                    param.grad = torch.full_like(param, torch.nan)
            optimizer.found_inf = torch.tensor(fault)
            optimizer.step()
            state = optimizer.state_dict()["state"]
            moments = [s[key] for s in state.values() for key in sorted(s) if key != "step"]
            states.append([t.clone() for t in (*net.state_dict().values(), *moments)])
        assert all(map(torch.equal, *states))


def test_it_resumes_to_the_last_bit():
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    optimizer = rd.Muon(net, 0.02, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def advance(net, optimizer, scheduler, numbers):
        for number in numbers:
            set_grads(net.parameters(), number)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    advance(net, optimizer, scheduler, range(3))
    other = copy.deepcopy(net)
    resumed = rd.Muon(other, 1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    later = torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 1 / (1 + step))
    later.load_state_dict(scheduler.state_dict())
    for group, own in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        group["lr"] = own["lr"]  # a scheduler's constructor has set it
    advance(net, optimizer, scheduler, range(3, 6))
    advance(other, resumed, later, range(3, 6))
    for one, there in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, there)


def names(net, params):
    ids = {id(param) for param in params}
    return {name for name, param in net.named_parameters() if id(param) in ids}


def test_what_is_a_matrix():
    net = nn.ModuleDict(
        {
            "tokens": nn.Embedding(5, 4),
            "linear": nn.Linear(4, 4),
            "conv": nn.Conv2d(4, 8, 3, groups=2),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "transposed": nn.ConvTranspose2d(4, 2, 3),
            "attention": nn.MultiheadAttention(4, 2),
            "norm": nn.LayerNorm((4, 4)),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "complex": nn.Linear(4, 4, dtype=torch.complex64),
            "inner": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            "inner2": nn.Linear(4, 4),
        }
    )
    found, others = split_parameters(net, ["inner", "linear.bias"])
    assert names(net, found) == {
        "linear.weight",
        "conv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "inner2.weight",
    }
    assert len(found) + len(others) == len(list(net.parameters()))


def test_a_shared_weight_is_a_matrix_only_if_it_is_one_everywhere():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    found, others = split_parameters(net)
    assert not found and len(others) == 1


def test_stem_and_head_of_our_models_belong_to_the_rest_however_they_are_cut():
    for name in ("revnet18", "rev_gpt_nano"):
        model = rd.create_model(name, device="meta")
        found = names(model, split_parameters(model)[0])
        outside = {name for name, p in model.named_parameters() if p.ndim > 1} - found
        assert found and outside and {name.split(".")[0] for name in outside} == {"stem", "head"}
    model = rd.create_model("revnet18", image_size=32, depths=(1, 1, 1, 1), width=4)
    seen: set[str] = set()

    def make(stage):
        optimizer = rd.Muon(stage, 0.02)
        seen.update(names(model, optimizer.param_groups[0]["params"]))
        return optimizer

    loss = nn.CrossEntropyLoss()
    rd.Pipeline(model, stages="auto", loss=loss, optimizer=make)
    assert seen == names(model, split_parameters(model)[0])


def test_a_module_says_itself_that_it_belongs_to_the_rest():
    net = nn.Sequential(MLP(4), nn.Linear(4, 4))
    net[1].orthogonalise = False  # type: ignore[assignment]
    assert names(net, split_parameters(net)[0]) == names(net, split_parameters(net, ["1"])[0])


def test_a_module_is_excluded_by_any_of_its_names():
    inner = nn.Linear(4, 4)
    net = nn.ModuleDict({"one": inner, "other": inner, "last": nn.Linear(4, 4)})
    assert names(net, split_parameters(net, "other")[0]) == {"last.weight"}


def test_a_large_gradient_in_half_precision():
    net = nn.Linear(300, 300, bias=False).half()
    net.weight.grad = torch.full_like(net.weight, 1000.0)  # its norm is no float16
    before = net.weight.detach().clone()
    rd.Muon(net, 0.1).step()
    assert not torch.equal(net.weight, before)


def test_matrices_without_elements():
    net = nn.Linear(1, 4)
    net.weight = nn.Parameter(torch.empty(4, 0))
    net(torch.ones(2, 0)).sum().backward()
    rd.Muon(net, 0.1, scale="spectral").step()


def test_rates_of_both_kinds_are_apart():
    first, second = rd.Muon(nn.Linear(2, 2), torch.tensor(0.1)).param_groups
    first["lr"].fill_(0.0)
    assert second["lr"] == 0.1


def test_added_parameters_belong_to_the_rest():
    net, more = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = rd.Muon(net, 0.02)
    optimizer.add_param_group({"params": [more.weight]})
    optimizer.add_param_group({"params": [more.bias], "lr": 0.5})
    last = nn.Linear(3, 3)
    optimizer.add_param_group({"params": [last.weight], "kind": "muon", "lr": 0.1})
    optimizer = copy.deepcopy((net, more, last, optimizer))[-1]  # with its defaults
    kinds = [(group["kind"], group["lr"]) for group in optimizer.param_groups]
    assert kinds == [("muon", 0.02), *[("adamw", lr) for lr in (0.02, 0.02, 0.5)], ("muon", 0.1)]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    set_grads(params, 0)
    optimizer.step()
    assert ["exp_avg" in optimizer.state[param] for param in params] == [False, *[True] * 3, False]
    with pytest.raises(ValueError, match="kind of a group must be 'muon' or 'adamw', got 'sgd'"):
        optimizer.add_param_group({"params": [last.bias], "kind": "sgd"})


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"lr": -1.0}, "lr must be a number, at least 0"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"lr": None}, "lr must be a number, at least 0, got None"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum must be a number, at least 0 and below 1, got 1"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay must be"),
        ({"lr": 0.1, "scale": "large"}, "scale must be 'match_rms_adamw' or 'spectral'"),
        ({"lr": 0.1, "rest": "adam"}, "rest must be 'adamw' or 'sgd'"),
        ({"lr": 0.1, "exclude": ["haed"]}, "exclude names 'haed', and Linear has none"),
    ],
)
def test_bad_arguments_are_refused(keywords, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rd.Muon(nn.Linear(2, 2), **keywords)


def test_parameters_instead_of_a_module_are_refused():
    with pytest.raises(TypeError, match="Muon takes a module"):
        rd.Muon(nn.Linear(2, 2).parameters(), lr=0.1)  # type: ignore[arg-type]
