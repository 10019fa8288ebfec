"""Overlap, capture, compile and auto on a GPU: the same gradients, no race, no waiting."""

import copy
import gc
import logging
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, ConvNorm, token_chain
from support.oracle import gradients, run_plainly, weigh, worst_error
from torch import nn

import redivider as rd
from redivider.backward.overlap import CudaLanes, Overlap

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]

AHEAD = ("overlap", "checkpoint-overlap")


def tokens(batch=4, dtype=torch.float32):
    return torch.randn(batch, 10, 6, device="cuda", dtype=dtype)


def pass_through(chain, x):
    chain.zero_grad()
    loss = weigh(chain(x))
    loss.backward()
    return loss


@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("backward", AHEAD)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7, 8, 9, 48])
def test_gradients_are_those_of_store(depth, backward, how):
    chain = token_chain(depth, backward=backward)
    stored = copy.deepcopy(chain)
    stored.backward = "store"
    if how == "compiled":
        torch._dynamo.reset()
        chain.compile()
    x = tokens()

    step = partial(pass_through, chain)

    if how == "captured":
        run = rd.capture(step, x)
        x = tokens()
        run(x)
    else:
        step(x)
    weigh(stored(x)).backward()
    assert worst_error(gradients(chain), gradients(stored)) <= 1e-5


@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7, 8, 9, 48])
def test_on_the_grid_gradients_are_exactly_those_of_store(depth, how):
    units = [rd.Coupling(MLP(64)) for _ in range(depth)]
    chain = rd.Chain(
        [nn.Linear(6, 64), rd.Duplicate(), *units, rd.Fuse()],
        backward="overlap",
        arithmetic=rd.Fixed(16),
    ).cuda()
    stored = copy.deepcopy(chain)
    stored.backward = "store"
    if how == "compiled":  # both: a compiled f rounds otherwise than an eager one
        torch._dynamo.reset()
        for model in (chain, stored):
            model.compile()
    x = tokens()

    step = partial(pass_through, chain)

    rd.capture(step, x)(x) if how == "captured" else step(x)
    weigh(stored(x)).backward()
    grads: dict[str, Any] = gradients(chain)
    expected: dict[str, Any] = gradients(stored)
    for key, grad in expected.items():
        assert torch.equal(grads[key], grad), key


class Sleepy(CudaLanes):
    """Puts delays of random length into either lane at random places."""

    random = random.Random(0)

    def sleep(self, lane):
        if self.random.random() < 0.4:
            with torch.cuda.stream(self._streams[lane]):
                torch.cuda._sleep(self.random.randrange(2_000_000))

    def on(self, lane):
        self.sleep(lane)
        return super().on(lane)

    def mark(self, lane):
        self.sleep(lane)
        return super().mark(lane)

    def wait(self, lane, event):
        super().wait(lane, event)
        self.sleep(lane)


def race(chain, kinds, num_trials, num_inputs=5):
    """Compute gradients by one strategy after another; return the error of each trial.

    Every trial has another input than the one before. Memory that is read too early holds values of
    the last trial, which would be right if the input were the same.
    """
    inputs = [tokens(16, torch.float64) for _ in range(num_inputs)]
    chain.backward, true, errors = "reverse", [], []
    for x in inputs:
        chain.zero_grad()
        weigh(chain(x)).backward()
        grads: dict[str, Any] = gradients(chain)
        true.append({key: grad.clone() for key, grad in grads.items()})
    for trial in range(num_trials):
        chain.backward = kinds[trial % len(kinds)]
        # In the second half gradients are added up, so autograd reads them at once.
        numbers = [trial % num_inputs, (trial + 2) % num_inputs][: 1 + (2 * trial // num_trials)]
        chain.zero_grad()
        for number in numbers:
            weigh(chain(inputs[number])).backward()
        torch.cuda.synchronize()
        total = {key: sum(true[number][key] for number in numbers) for key in true[0]}
        errors.append(worst_error(gradients(chain), total))
    return errors


@pytest.mark.parametrize("compiled", [False, True])
def test_delays_on_either_stream_show_no_race(monkeypatch, compiled):
    monkeypatch.setattr(Overlap, "_make_lanes", lambda self: Sleepy(self._device))
    chain = token_chain(7, width=128).double()
    if compiled:
        torch._dynamo.reset()
        chain.compile()
    assert max(race(chain, AHEAD, 200)) <= 1e-12


@pytest.mark.parametrize("compiled", [False, True])
def test_the_control_a_missing_wait_is_seen(monkeypatch, compiled):
    class Careless(Sleepy):
        def wait(self, lane, event):
            self.sleep(lane)

    monkeypatch.setattr(Overlap, "_make_lanes", lambda self: Careless(self._device))
    chain = token_chain(7, width=128).double()
    if compiled:
        torch._dynamo.reset()
        chain.compile()
    assert not max(race(chain, ("overlap",), 20)) <= 1e-12


@pytest.mark.parametrize("backward", [*AHEAD, "auto"])
def test_a_whole_step_waits_for_nothing(backward):
    chain = token_chain(6, dropout=0.1, backward=backward)
    optimizer = torch.optim.AdamW(chain.parameters(), fused=True)
    x = tokens()
    for step in range(12):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = weigh(chain(x))
            loss.backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


@pytest.mark.parametrize("backward", AHEAD)
def test_on_a_side_stream_with_dropout_junctions_and_accumulation(backward):
    rows = [[rd.Coupling(ConvNorm(4)) for _ in range(n)] for n in (3, 1, 2)]

    class Junction(nn.Conv2d):
        def forward(self, streams):
            return super().forward(streams[0]), F.dropout(streams[1], 0.3)

    def junction():
        return Junction(4, 4, 3, padding=1)

    units = [rd.Split(dim=1), *rows[0], junction(), *rows[1], junction(), *rows[2], rd.Fuse(dim=1)]
    chain = rd.Chain(units, backward=backward).double().cuda()
    plain = copy.deepcopy(chain)
    x = torch.randn(3, 8, 6, 6, device="cuda").double()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in (chain, lambda x: run_plainly(plain, x)):
            for seed in (1, 2):
                torch.manual_seed(seed)
                weigh(run(x)).backward()
    torch.cuda.current_stream().wait_stream(side)
    assert worst_error(gradients(chain), gradients(plain)) <= 1e-12
    for buffer, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-12)


def test_gradients_are_not_copied():
    """Autograd takes the side stream's tensor itself; it would copy one that is also held."""

    def are_same(chain):
        seen = {}
        for key, param in chain.named_parameters():
            param.register_hook(lambda grad, key=key: seen.update({key: grad.data_ptr()}))
        weigh(chain(tokens())).backward()
        return [param.grad.data_ptr() == seen[key] for key, param in chain.named_parameters()]

    chain = token_chain(5, backward="overlap")
    same = are_same(chain)
    reverse = token_chain(5, backward="reverse")
    true = are_same(reverse)
    assert same == true and any(same)


def train(chain, optimizer, x, target):
    optimizer.zero_grad()
    loss = F.cross_entropy(chain(x).mean(1), target)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("make", ["sgd", "adamw", "adamw-fused"])
@pytest.mark.parametrize("backward", ["store", "reverse", "overlap", "auto"])
def test_a_captured_training_run_is_the_eager_one(backward, make):
    def make_optimizer(chain):
        if make == "sgd":
            return torch.optim.SGD(chain.parameters(), lr=0.05, momentum=0.9, fused=True)
        options: dict[str, Any] = {"fused": True} if "fused" in make else {"capturable": True}
        return torch.optim.AdamW(chain.parameters(), lr=1e-3, **options)

    one = token_chain(5, backward=backward).double()
    other = copy.deepcopy(one)
    optimizers = [make_optimizer(one), make_optimizer(other)]
    batches = [(tokens(8, torch.float64), torch.randint(3, (8,), device="cuda")) for _ in range(6)]
    before = copy.deepcopy(one.state_dict())
    step = rd.capture(lambda x, t: train(one, optimizers[0], x, t), batches[0])
    for key, value in one.state_dict().items():
        assert torch.equal(value, before[key]), "capturing has trained"
    losses = []
    for number, batch in enumerate(batches):
        if number == 3:  # by hand, as a number
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 1e-4
        losses.append(step(*batch))
        loss = train(other, optimizers[1], *batch)
        assert losses[-1].item() == pytest.approx(loss.item(), rel=1e-6)  # its rate is a float32
    distinct = {loss.item() for loss in losses}
    assert len(distinct) == len(losses), "a later step has overwritten a loss"
    for key, value in one.state_dict().items():
        assert torch.allclose(value, other.state_dict()[key], rtol=1e-5, atol=1e-7), key


def test_dropout_in_a_captured_step_is_new_each_time_and_the_same_in_both_runs():
    chain = token_chain(4, dropout=0.5, backward="overlap").double()
    x = tokens(8, torch.float64)

    def step(x):
        chain.zero_grad()
        y = chain(x)
        y.sum().backward()
        return y

    run = rd.capture(step, x)
    outputs, grads = [], []
    for _ in range(3):
        outputs.append(run(x))
        grads.append(chain[0].weight.grad.clone())
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    # If the masks of the second run were others, a step along the gradient would not do what the
    # gradient says. Linear in the head's bias alone, so compare with the masks held: same seed.
    stored = copy.deepcopy(chain)
    stored.backward = "store"

    def plain(x):
        stored.zero_grad()
        y = stored(x)
        y.sum().backward()
        return y

    torch.manual_seed(7)
    mine = rd.capture(step, x)
    torch.manual_seed(9)
    y, grad = mine(x), chain[0].weight.grad.clone()
    theirs = rd.capture(plain, x)
    torch.manual_seed(9)
    assert torch.allclose(y, theirs(x), rtol=1e-9), "the same draws as the plain model's"
    assert torch.allclose(grad, stored[0].weight.grad, rtol=1e-7, atol=1e-9)


def setting(make):
    chain = token_chain(2)
    optimizer = make(chain.parameters())
    batch = (tokens(8), torch.randint(3, (8,), device="cuda"))
    return optimizer, (lambda x, t: train(chain, optimizer, x, t)), batch


def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)


def test_a_captured_step_outlives_another():
    """With a graph, torch 2.13 frees the cuBLAS workspaces of the stream it was captured on."""
    torch.manual_seed(0)
    first, second = (nn.Linear(640, 640, bias=False).cuda().half() for _ in range(2))

    def train(model, x):
        model.weight.grad = None
        loss = model(model(x)).float().square().mean()
        loss.backward()
        return loss.detach(), model.weight.grad

    x = torch.randn(32768, 640, device="cuda").half()
    kept = rd.capture(partial(train, first), x)
    expected = kept(x)
    dropped = rd.capture(partial(train, second), x)
    dropped(x)
    del dropped
    gc.collect()
    torch.cuda.empty_cache()
    rest = torch.full((2**26,), torch.nan, device="cuda")  # in memory that was freed
    assert all(map(torch.equal, kept(x), expected)) and rest.isnan().all()


def test_what_waits_for_the_device_is_refused_with_its_line():
    _, step, batch = setting(fused)

    def waits(x, target):
        loss = step(x, target)
        print(loss.item())  # here
        return loss

    with pytest.raises(rd.CaptureError, match=r"test_overlap.py:\d+: print\(loss.item\(\)\)"):
        rd.capture(waits, batch)


def test_what_else_cannot_be_captured_says_so():
    _, step, batch = setting(torch.optim.AdamW)
    with pytest.raises(rd.CaptureError, match=r"AdamW counts .* capturable=True or fused=True"):
        rd.capture(step, batch)
    _, step, batch = setting(fused)
    with pytest.raises(rd.CaptureError, match="returns float"):
        rd.capture(lambda x, t: (step(x, t), 0.5)[1], batch)


def test_a_captured_step_refuses_other_shapes_and_rates_it_cannot_change():
    _, step, batch = setting(fused)
    captured = rd.capture(step, batch)
    with pytest.raises(rd.CaptureError, match=r"input 0 is .* \(4, 10, 6\), .* \(8, 10, 6\)"):
        captured(tokens(4), batch[1])
    assert captured(*batch).isfinite()
    sgd, step, batch = setting(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    captured = rd.capture(step, batch)
    sgd.param_groups[0]["lr"] = 0.2
    with pytest.raises(
        rd.CaptureError, match=r"SGD was captured with lr = 0.1 and cannot have 0.2"
    ):
        captured(*batch)


def test_an_optimizer_outside_of_the_step_gets_its_gradients():
    chains = [token_chain(3).double() for _ in range(2)]
    chains[1].load_state_dict(chains[0].state_dict())
    optimizers = [torch.optim.SGD(chain.parameters(), lr=0.1) for chain in chains]
    target = torch.randint(3, (8,), device="cuda")

    def gradient(chain, x):
        loss = F.cross_entropy(chain(x).mean(1), target)
        loss.backward()
        return loss

    step = rd.capture(lambda x: gradient(chains[0], x), tokens(8, torch.float64))
    assert all(param.grad is None for param in chains[0].parameters())
    for _ in range(3):
        x = tokens(8, torch.float64)
        step(x)
        gradient(chains[1], x)
        assert worst_error(gradients(chains[0]), gradients(chains[1])) <= 1e-9
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_what_a_graph_cannot_follow_is_refused():
    optimizer, step, batch = setting(fused)
    captured = rd.capture(step, batch)
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(rd.CaptureError, match=r"AdamW was captured with betas = .* capture the"):
        captured(*batch)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert captured(*batch).isfinite()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(rd.CaptureError, match="as after load_state_dict"):
        captured(*batch)


def test_after_a_capture_that_failed_all_goes_on():
    optimizer, step, batch = setting(fused)
    weights = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    x = batch[0]

    def unlucky(x, target):
        loss = step(x, target)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return loss

    message = ""
    try:  # with pytest.raises the graph of that step would live on, with its CUDA stream
        rd.capture(unlucky, batch)
    except rd.CaptureError as error:
        message = str(error)
    assert "failed while it was captured" in message and "synchronize" in message
    gc.collect()
    for parameter, before in zip(optimizer.param_groups[0]["params"], weights, strict=True):
        assert torch.equal(parameter, before), "trying it out has trained"
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert F.dropout(x, 0.5).isfinite().all()
    assert step(*batch).isfinite()
    assert rd.capture(step, batch)(*batch).isfinite()


def test_auto_times_both_once_and_says_what_it_chose(caplog):
    chain = token_chain(6, width=256, backward="auto")
    caplog.set_level(logging.INFO, "redivider")
    for _ in range(3):
        weigh(chain(tokens())).backward()
    messages = [record.message for record in caplog.records if "auto" in record.message]
    assert len(messages) == 1 and "overlap" in messages[0] and "reverse" in messages[0]
    weigh(chain(tokens(8))).backward()  # another shape is another choice
    assert chain._auto is not None
    assert len(chain._auto.choices) == 2
    assert {*chain._auto.choices.values()} <= {"reverse", "overlap"}


def test_auto_leaves_no_trace():
    """Losses, gradients and random numbers are those of the strategy that it takes."""
    results = []
    chain = token_chain(6, width=256, backward="auto", dropout=0.1)
    other = copy.deepcopy(chain)
    for model in (chain, other):
        torch.manual_seed(0)
        losses = []
        for _ in range(3):
            loss = weigh(model(tokens()))
            loss.backward()
            losses.append(loss.detach())
        results.append([*losses, *(p.grad for p in model.parameters()), torch.rand(1).cuda()])
        if model is chain:
            assert chain._auto is not None
            (other.backward,) = chain._auto.choices.values()
    for one, true in zip(*results, strict=True):
        assert torch.allclose(one, true, rtol=1e-4, atol=1e-6)


def test_layers_share_their_graphs():
    torch._dynamo.reset()
    chain = token_chain(24, backward="overlap")
    count = []

    def backend(module, inputs):
        count.append(module)
        return module.forward

    chain.compile(backend=backend)
    for _ in range(3):
        weigh(chain(tokens())).backward()
    # Attention and MLP twice each, stem and head, which keep their graphs, and the arithmetic.
    assert len(count) <= 2 * 2 + 2 + 2
