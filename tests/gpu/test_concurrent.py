"""Captured ticks on a GPU: those of lockstep, with dropout, batch norm and random delays."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from networks import MLP
from torch import nn

import redivider as rd
from redivider.pipeline.concurrent import Concurrent
from redivider.pipeline.graphs import CudaGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def optimizer(stage):
    return torch.optim.SGD(
        stage.parameters(), lr=torch.tensor(0.02, device="cuda"), momentum=0.9, fused=True
    )


def falling(update):
    return 1 / (1 + 0.05 * update)


def make(model, *, capture, stages=5, accumulate=1, **options):
    return rd.Pipeline(
        model,
        stages=stages,
        loss=F.cross_entropy,
        optimizer=optimizer,
        lr_lambda=falling,
        accumulate=accumulate,
        capture=capture,
        seed=3,
        **options,
    )


def tokens_model():
    torch.manual_seed(0)
    couplings = [rd.Coupling(MLP(32, dropout=0.2)) for _ in range(6)]
    units = [nn.Linear(8, 32), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(64, 5)]
    return rd.Chain(units).cuda()


def batch(number, images=False):
    generator = torch.Generator().manual_seed(number)
    shape = (8, 3, 32, 32) if images else (16, 8)
    x = torch.randn(shape, generator=generator)
    y = torch.randint(5, shape[:1], generator=generator)
    return x.cuda(), y.cuda()


def run(pipe, number, start=0, images=False):
    losses = []
    for index in range(start, start + number):
        tick = pipe.step(*batch(index, images))
        losses += [] if tick.loss is None else [tick.loss]
    return torch.stack(losses)


def equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_captured_ticks_are_the_eager_ones(accumulate):
    models = [tokens_model() for _ in range(2)]
    pipes = [
        make(m, capture=c, accumulate=accumulate)
        for m, c in zip(models, (True, False), strict=True)
    ]
    losses = [run(pipe, 200) for pipe in pipes]
    assert pipes[0]._concurrent.is_active
    assert torch.equal(*losses)
    assert equal(*models)
    state = pipes[0].state_dict()
    assert torch.equal(run(pipes[0], 30, 200), run(pipes[1], 30, 200))
    pipes[0].load_state_dict(state)
    again = run(pipes[0], 60, 200)
    assert torch.equal(again, torch.cat([again[:30], run(pipes[1], 30, 230)]))
    assert torch.equal(
        torch.stack([t.loss for t in pipes[0].flush()]),
        torch.stack([t.loss for t in pipes[1].flush()]),
    )
    assert equal(*models)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_revnet(accumulate):
    models = [
        rd.create_model("revnet18", num_classes=5, image_size=32, device="cuda") for _ in range(2)
    ]
    pipes = [
        make(m, capture=c, accumulate=accumulate, stages=10)
        for m, c in zip(models, (True, False), strict=True)
    ]
    torch.backends.cudnn.deterministic = True
    try:
        losses = [run(pipe, 200, images=True) for pipe in pipes]
    finally:
        torch.backends.cudnn.deterministic = False
    assert pipes[0]._concurrent.is_active
    assert torch.equal(*losses)
    assert equal(*models)


class Sleepy(CudaGraphs):
    random = random.Random(0)

    def lane(self, index):
        with super().lane(index):
            if self.random.random() < 0.5:
                torch.cuda._sleep(self.random.randrange(300_000))
        return super().lane(index)


def test_random_delays_in_branches_change_nothing():
    true = None
    for trial in range(12):
        model = tokens_model()
        pipe = make(model, capture=True)
        if trial:
            pipe._concurrent = Concurrent(pipe, partial(Sleepy, torch.device("cuda")))
        losses = run(pipe, 60)
        true = losses if true is None else true
        assert torch.equal(losses, true)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_nothing():
    pipe = make(tokens_model(), capture=True)
    run(pipe, 30)
    assert pipe._concurrent.is_active
    batches = [batch(index) for index in range(20)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in batches:
            pipe.step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_loss_that_is_not_a_number_is_reported_and_no_update_follows():
    model = tokens_model()
    pipe = make(model, capture=True)
    run(pipe, 40)
    x, y = batch(0)
    with pytest.raises(FloatingPointError, match="micro-batch 40 is not a number"):
        pipe.step(x * torch.nan, y)
        for index in range(200):
            pipe.step(*batch(index))
            torch.cuda.synchronize()
    assert all(each.isfinite().all() for each in model.parameters())


def test_memory_does_not_grow_over_2000_ticks():
    pipe = make(tokens_model(), capture=True)
    run(pipe, 100)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for index in range(2000):
        pipe.step(*batch(index % 7))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
