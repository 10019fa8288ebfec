"""Captured ticks on a GPU are those of lockstep, with dropout, batch norm and random delays."""

import random
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread

import pytest
import torch
import torch.nn.functional as F
from support.networks import MLP, Reading
from torch import nn

import redivider as rd
from redivider.pipeline.runners.captured import CapturedRunner
from redivider.pipeline.runners.cuda_graphs import CudaGraphs

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


def tokens_model(dropout=0.2):
    torch.manual_seed(0)
    couplings = [rd.Coupling(MLP(32, dropout=dropout)) for _ in range(6)]
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
    assert pipes[0].execution.is_active
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


@contextmanager
def same_kernels():
    """Let cudnn take kernels that give the same sum twice."""
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("accumulate, dtype", [(1, None), (2, torch.bfloat16), (3, None)])
def test_revnet(accumulate, dtype):
    models = [
        rd.create_model("revnet18", num_classes=5, image_size=32, device="cuda") for _ in range(2)
    ]
    for model in models:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pipes = [
        make(m, capture=c, accumulate=accumulate, stages=10)
        for m, c in zip(models, (True, False), strict=True)
    ]
    with same_kernels(), torch.autocast("cuda", dtype, enabled=dtype is not None):
        losses = [run(pipe, 200, images=True) for pipe in pipes]
        assert pipes[0].execution.is_active
        assert torch.equal(*losses)
        assert equal(*models)
        state = pipes[0].state_dict()
        losses = [run(pipe, 40, 200, images=True) for pipe in pipes]
        assert torch.equal(*losses)
        pipes[0].load_state_dict(state)
        assert torch.equal(run(pipes[0], 40, 200, images=True), losses[1])
    assert equal(*models)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at inputs
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled():
    """Captured and eager run the same kernels; plain ones differ by rounding.

    Without dropout, whose numbers the compiler draws in another way.
    """
    losses = []
    for capture, compiled in ((True, True), (False, True), (False, False)):
        pipe = make(tokens_model(dropout=0.0), capture=capture)
        if compiled:
            # Else kernels are tuned, and not to the same choices in both runs.
            pipe.compile(dynamic=False, options={"deterministic": True})
        losses.append(run(pipe, 60))
        assert not capture or pipe.execution.is_active
    assert torch.equal(*losses[:2])
    assert torch.allclose(losses[0][:10], losses[2][:10], rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"clip_norm": 0.2, "clip_over": "all"},
        {"lookahead": True},
        {"method": "dsp"},
        {"latency": 2},
        {"latency": 0.5},
        {"latency": 1.5, "lookahead": True},
        {"latency": 0.5, "clip_norm": 0.2, "clip_over": "all"},
        {"message_dtype": torch.int8, "latency": 0.5},
        {"message_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_options(options):
    models = [tokens_model() for _ in range(2)]
    pipes = [
        make(m, capture=c, accumulate=2, **options)
        for m, c in zip(models, (True, False), strict=True)
    ]
    losses = [run(pipe, 100) for pipe in pipes]
    assert pipes[0].execution.is_active
    assert torch.equal(*losses)
    assert equal(*models)


def test_an_optimizer_that_chose_nothing_is_fused():
    chosen = []
    for options in ({}, {"foreach": True}):

        def make_optimizer(stage, options=options):
            return torch.optim.AdamW(stage.parameters(), lr=1e-3, **options)

        pipe = rd.Pipeline(tokens_model(), stages=3, loss=F.cross_entropy, optimizer=make_optimizer)
        run(pipe, 30)
        chosen.append(pipe.execution.is_active)
    assert chosen == [True, False]


def test_what_cannot_be_captured_stays_eager_and_is_said(caplog):
    caplog.set_level("INFO", "redivider")
    losses = []
    for capture in (True, False):
        torch.manual_seed(0)
        units = [nn.Linear(8, 32), rd.Duplicate(), rd.Coupling(Reading(32)), rd.Fuse()]
        pipe = make(rd.Chain([*units, nn.Linear(64, 5)]).cuda(), capture=capture, stages=3)
        losses.append(run(pipe, 40))
    assert torch.equal(*losses)
    messages = [record.message for record in caplog.records if "not captured" in record.message]
    assert len(messages) == 1 and "unit 2" in messages[0]
    # And the next one can be captured.
    pipe = make(tokens_model(), capture=True)
    run(pipe, 60)
    assert pipe.execution.is_active


class Sleepy(CudaGraphs):
    random = random.Random(0)

    def lane(self, index):
        with super().lane(index):
            if self.random.random() < 0.5:
                torch.cuda._sleep(self.random.randrange(100_000))
        return super().lane(index)


@pytest.mark.parametrize("latency", [1, 0.5])
def test_random_delays_in_branches_change_nothing(latency):
    pipe = make(tokens_model(), capture=True, latency=latency)
    pipe.execution = CapturedRunner(pipe, partial(Sleepy, torch.device("cuda")))
    plain = make(tokens_model(), capture=False, latency=latency)
    for trial in range(30):
        # Another state and other inputs each time: what is left of the last trial is wrong.
        plain.load_state_dict(pipe.state_dict())
        losses = [run(p, 24, 24 * trial) for p in (pipe, plain)]
        assert pipe.execution.is_active
        assert torch.equal(*losses)
        pipe.execution.leave()
        pipe.execution.forget()


@pytest.mark.parametrize("capture", [True, False])
def test_inputs_may_come_from_the_host(capture):
    models = [tokens_model() for _ in range(2)]
    pipes = [make(model, capture=capture) for model in models]
    for index in range(60):
        x, y = batch(index)
        torch.cuda._sleep(1_000_000)  # a tick that is still running when the next input comes
        ticks = [pipes[0].step(x, y), pipes[1].step(x.cpu().pin_memory(), y.cpu())]
        assert ticks[0].loss is None or torch.equal(ticks[0].loss, ticks[1].loss)
    assert not capture or pipes[1].execution.is_active
    assert equal(*models)


def test_other_threads_may_go_on_while_ticks_are_recorded():
    """As a loader's that pins its batches."""
    done, faults = Event(), []

    def pin():
        size = 1
        while not done.is_set():
            try:
                torch.empty(size % 2**20 + 1).pin_memory().cuda(non_blocking=True)
            except RuntimeError as error:
                faults.append(error)
            size += 40_009

    thread = Thread(target=pin)
    thread.start()
    try:
        pipe = make(tokens_model(), capture=True)
        run(pipe, 60)
    finally:
        done.set()
        thread.join()
    assert pipe.execution.is_active
    assert not faults


def test_a_step_waits_for_nothing():
    pipe = make(tokens_model(), capture=True)
    run(pipe, 30)
    assert pipe.execution.is_active
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
    with pytest.raises(FloatingPointError, match="micro-batch 40 is NaN"):
        pipe.step(x * torch.nan, y)
        for index in range(200):
            pipe.step(*batch(index))
            torch.cuda.synchronize()
    assert all(param.isfinite().all() for param in model.parameters())


def test_memory_does_not_grow_over_2000_ticks():
    pipe = make(tokens_model(), capture=True)
    run(pipe, 100)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for index in range(2000):
        pipe.step(*batch(index % 7))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
