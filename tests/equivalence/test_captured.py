"""Recorded ticks compute the same numbers as lockstep ones, in any order of the branches."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.captured import CUTS, OPTIMIZERS, build, network, run
from support.networks import MLP, Buffered, ConvNorm, Reading
from support.oracle import equal
from support.pipelines import batches, rate
from support.tape import Tape
from torch import Tensor, nn

import redivider as rd
from redivider.pipeline.diagnostics.memory import holdings
from redivider.pipeline.runners.capturable import reason_against
from redivider.pipeline.runners.captured import CapturedRunner, num_phases
from redivider.pipeline.stages.fused_optimizer import fuse

pytestmark = pytest.mark.slow


@pytest.fixture
def few(monkeypatch):
    """Record three phases instead of eight: recording takes longest, and three are enough."""
    monkeypatch.setattr("redivider.pipeline.runners.captured.NUM_PHASES", 3)


def num_eager(stages, accumulate=1, latency=1):
    """Return the number of ticks in lockstep before the first recording.

    The pipeline fills, all stages update twice, and everything in flight is new.
    """
    return 4 * latency * (stages - 1) + 2 * accumulate + 2


def build_both(make, stages="auto", **options):
    """Return two pipelines of the same model, recorded and in lockstep."""
    pipes = []
    for recorded in (True, False):
        torch.manual_seed(0)
        pipe = rd.Pipeline(
            make(), stages=stages, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], **options
        )
        if recorded:
            pipe.execution = CapturedRunner(pipe, Tape)
        pipes.append(pipe)
    return pipes


def around(f):
    """Return a model around one coupling."""
    units = [nn.Linear(5, 8), rd.Duplicate(), rd.Coupling(f), rd.Fuse(), nn.Linear(16, 3)]
    return rd.Chain(units).double()


@pytest.mark.parametrize(
    "stages, accumulate, latency",
    [(2, 1, 1), (3, 1, 2), (3, 3, 1), (5, 2, 2), (9, 2, 1)],
)
def test_ticks_are_those_of_lockstep(stages, accumulate, latency):
    num_ticks = num_eager(stages, accumulate, latency) + 20  # two cycles of phases, and more
    pipes = [
        build(CUTS[stages], accumulate=accumulate, latency=latency, recorded=recorded)
        for recorded in (True, False)
    ]
    seen = [run(pipe, num_ticks) for pipe in pipes]
    assert pipes[0].execution.is_active
    assert pipes[0].execution._graphs.num_replays > 10
    assert equal(*seen)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())
    ends = [[(t.microbatch, t.loss, t.aux) for t in pipe.flush()] for pipe in pipes]
    assert equal(*ends)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["petra", "dsp"])
def test_methods_and_optimizers(method, optimizer):
    pipes = [
        build(CUTS[3], method=method, optimizer=optimizer, accumulate=2, recorded=recorded)
        for recorded in (True, False)
    ]
    assert equal(*[run(pipe, num_eager(3, 2) + 12) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


@cache
def run_plainly(stages, accumulate, num):
    """Run a pipeline without further options, once for all of them."""
    return run(build(CUTS[stages], accumulate=accumulate, recorded=False), num)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "stages, accumulate, options",
    [
        (3, 1, {"clip_norm": 0.05}),
        (5, 3, {"clip_norm": 0.1, "clip_over": "all"}),
        (3, 1, {"lookahead": True}),
        (5, 3, {"lookahead": True}),
        (5, 2, {"lookahead": True, "optimizer": "muon"}),
        (3, 3, {"lookahead": True, "latency": 0.5}),
        (5, 2, {"lookahead": "lead"}),
        (5, 2, {"lookahead": True, "optimizer": "adamw", "method": "dsp", "clip_norm": 0.1}),
        (3, 3, {"lr_by_delay": True}),
        (5, 2, {"message_dtype": torch.int8, "latency": 0.5}),
    ],
    ids=str,
)
def test_clipping_look_ahead_rates_and_packed_messages(stages, accumulate, options):
    pipes = [
        build(CUTS[stages], accumulate=accumulate, recorded=recorded, **options)
        for recorded in (True, False)
    ]
    num = num_eager(stages, accumulate) + 11  # a cycle of phases, and more
    seen = [run(pipe, num) for pipe in pipes]
    assert pipes[0].execution.is_active
    assert equal(*seen)
    assert not equal(seen[1], run_plainly(stages, accumulate, num))
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())  # and this ends the recording
    assert equal(*[run(pipe, 13, start=num) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("stages, accumulate", [(5, 1), (3, 3)])
def test_states_flushes_and_other_shapes_in_the_middle(stages, accumulate):
    pipes = [
        build(CUTS[stages], accumulate=accumulate, recorded=recorded) for recorded in (True, False)
    ]
    odd = torch.randn(2, 5).double(), torch.randint(3, (2,))
    seen = []
    for pipe in pipes:

        def is_active(pipe=pipe):
            return pipe is pipes[1] or pipe.execution.is_active

        ticks = run(pipe, 27)
        assert is_active()
        tick = pipe.step(*odd)
        ticks.append((tick.microbatch, tick.loss, tick.aux))
        ticks += run(pipe, 19, start=27)
        assert is_active()
        state = pipe.state_dict()
        ticks += run(pipe, 5, start=46)
        assert is_active()
        pipe.load_state_dict(state)
        ticks += run(pipe, 18, start=46)
        assert is_active()
        ticks += [(t.microbatch, t.loss, t.aux) for t in pipe.flush()]
        ticks += run(pipe, 30, start=64)
        assert is_active()
        seen.append(ticks)
    assert equal(*seen)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


@pytest.mark.usefixtures("few")
def test_the_order_of_the_branches_does_not_matter():
    ends = [run(build(CUTS[5], seed=seed), num_eager(5) + 12) for seed in range(3)]
    assert all(equal(ends[0], end) for end in ends[1:])


@pytest.mark.usefixtures("few")
def test_a_loss_that_is_not_a_number_is_reported_and_no_update_follows():
    pipe = build(CUTS[5])
    run(pipe, 23)
    assert pipe.execution.is_active
    bad = (torch.full((4, 5), torch.nan).double(), torch.zeros(4, dtype=torch.long))
    weights = []
    with pytest.raises(FloatingPointError, match=r"micro-batch 23 is NaN or infinite"):
        for number in range(60):
            tick = pipe.step(*(bad if number == 0 else next(batches(1, seed=number))))
            # The loss is computed, but the host has not seen it yet.
            if tick.microbatch >= 23:
                assert tick.loss.isnan() == (tick.microbatch == 23)
                weights.append(copy.deepcopy(pipe._chain.state_dict()))
    assert len(weights) > 2 and all(equal(weights[0], copied) for copied in weights)
    assert all(weight.isfinite().all() for weight in weights[0].values())
    for action in (lambda: pipe.step(*next(batches(1))), pipe.flush):
        with pytest.raises(RuntimeError, match="was stopped"):
            action()


@pytest.mark.usefixtures("few")
def test_a_fault_that_is_heard_of_at_a_flush_stops_the_pipeline():
    pipe = build(CUTS[3])
    run(pipe, 17)
    assert pipe.execution.is_active
    pipe.step(torch.full((4, 5), torch.inf).double(), torch.zeros(4, dtype=torch.long))
    run(pipe, 3, start=17)
    with pytest.raises(FloatingPointError, match=r"micro-batch 17"):
        pipe.flush()
    with pytest.raises(RuntimeError, match="was stopped"):
        pipe.flush()


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"method": "delayed"}, "keeps old weights"),
        ({"arithmetic": "fixed"}, "leaves its grid"),
        ({"optimizer": lambda s: torch.optim.SGD(s.parameters(), lr=0.1)}, "SGD is not fused"),
        ({}, None),
    ],
)
def test_what_cannot_be_recorded_has_a_reason(options, reason):
    options = {"optimizer": OPTIMIZERS["sgd"], **options}
    against = reason_against(rd.Pipeline(network(), stages=3, loss=F.cross_entropy, **options))
    assert (against is None) == (reason is None)
    if reason is not None:
        assert against is not None and reason in against


def test_rates_that_would_lose_bits_are_a_reason():
    """Fused kernels of a GPU read float32; the meta device stands for one."""
    pipe = rd.Pipeline(network(), stages=3, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])
    pipe.stages[1].module.to("meta")
    against = reason_against(pipe)
    assert against is not None
    assert "rates would be torch.float32, weights torch.float64" in against
    pipe.stages[1].module.float()
    assert reason_against(pipe) is None


@pytest.mark.usefixtures("few")
def test_what_is_held_is_counted_as_in_lockstep():
    pipes = [build(CUTS[3], recorded=recorded) for recorded in (True, False)]
    for pipe in pipes:
        run(pipe, 23)
    assert pipes[0].execution.is_active
    ours, theirs = (holdings(pipe) for pipe in pipes)
    assert not pipes[0].execution.is_active  # memory left over from the recording is not counted
    assert [held.activations for held in ours] == [held.activations for held in theirs]
    # Messages copied back from graphs share no memory.
    assert all(a.messages >= b.messages > 0 for a, b in zip(ours, theirs, strict=True))
    assert equal(*[run(pipe, 12, start=23) for pipe in pipes])


def test_large_messages_are_there_fewer_times(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    memory = type("Properties", (), {"total_memory": 3200})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert [num_phases(k, 10, gpu) for k in (1, 2, 3, 8, 12)] == [8, 8, 9, 8, 12]
    assert [num_phases(k, 20, gpu) for k in (1, 2, 3, 12)] == [5, 4, 3, 12]
    assert [num_phases(k, 10**6, gpu) for k in (1, 2, 3)] == [2, 2, 3]
    assert num_phases(1, 10**6, cpu) == 8


@pytest.mark.parametrize("accumulate", [1, 3])
def test_few_phases(accumulate, monkeypatch):
    monkeypatch.setattr("redivider.pipeline.runners.captured.NUM_PHASES", 1)
    pipes = [build(CUTS[3], accumulate=accumulate, recorded=r) for r in (True, False)]
    assert equal(*[run(pipe, num_eager(3, accumulate) + 10) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert pipes[0].execution._num_phases == max(2, accumulate)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


def test_units_that_move_their_buffers_stay_in_lockstep(caplog):
    caplog.set_level("WARNING", "redivider")  # a command line shows these
    pipes = build_both(lambda: around(Buffered(8)))
    assert equal(*[run(pipe, 30) for pipe in pipes])
    assert not pipes[0].execution.is_active
    said = [record.message for record in caplog.records if "not captured" in record.message]
    assert len(said) == 1 and "unit 2" in said[0] and "buffers" in said[0]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("what", ["eval", "freeze", "decay", "rate"])
def test_settings_changed_between_ticks_are_heeded(what):
    def change(pipe):
        if what == "eval":
            pipe._chain.eval()
        elif what == "freeze":
            next(pipe._chain.parameters()).requires_grad_(False)
        elif what == "rate":  # which is lr_lambda's, in both
            pipe.stages[1].optimizer.param_groups[0]["lr"] *= 0.1
        else:
            pipe.stages[1].optimizer.param_groups[0]["weight_decay"] = 0.5

    pipes = [build(CUTS[3], recorded=recorded) for recorded in (True, False)]
    seen = [run(pipe, 17) for pipe in pipes]
    assert pipes[0].execution.is_active
    for pipe, ticks in zip(pipes, seen, strict=True):
        change(pipe)
        ticks += run(pipe, 18, start=17)
    assert pipes[0].execution.is_active
    assert equal(*seen)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


def test_targets_that_may_change_behind_our_backs_are_not_captured():
    class Opaque:
        def __init__(self, target):
            self.target = target

    loss = lambda output, opaque: F.cross_entropy(output, opaque.target)  # noqa: E731
    pipe = rd.Pipeline(network(), stages=3, loss=loss, optimizer=OPTIMIZERS["sgd"])
    pipe.execution = CapturedRunner(pipe, Tape)
    for x, target in batches(20):
        pipe.step(x, Opaque(target))
    assert not pipe.execution.is_active


def test_a_parameter_that_trains_later_gets_its_momentum():
    weights = []
    for fused in (True, False):

        def optimizer(stage, fused=fused):
            params = stage.parameters()
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=fused, foreach=False)

        model = network()
        first = next(model.parameters()).requires_grad_(False)
        pipe = rd.Pipeline(model, stages=3, loss=F.cross_entropy, optimizer=optimizer)
        for number, (x, target) in enumerate(batches(20)):
            first.requires_grad_(number >= 10)
            pipe.step(x, target)
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=1e-10)


@pytest.mark.usefixtures("few")
def test_optimizers_with_hooks_stay_in_lockstep(caplog):
    caplog.set_level("INFO", "redivider")
    pipes = [build(CUTS[3], recorded=recorded) for recorded in (True, False)]
    seen = [run(pipe, 17) for pipe in pipes]
    assert pipes[0].execution.is_active
    for pipe, ticks in zip(pipes, seen, strict=True):
        pipe.stages[1].optimizer.register_step_post_hook(
            lambda optimizer, *_: [
                param.data.mul_(0.99) for param in optimizer.param_groups[0]["params"]
            ]
        )
        ticks += run(pipe, 15, start=17)
    assert not pipes[0].execution.is_active
    assert equal(*seen)
    assert "stage 1 has hooks" in caplog.text


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return torch.tanh(self.norm(x))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("first", [rd.Duplicate(), nn.Identity()])
def test_inputs_that_go_on_as_they_are(first):
    """The next input overwrites the last one, which the second stage still reads."""
    ends = [rd.Fuse()] if isinstance(first, rd.Duplicate) else []

    def make():
        norm = nn.BatchNorm1d(5)  # and two units of a stage may share a norm
        shared = [Normed(norm), Normed(norm)]
        units = [first, *ends, nn.Linear(10 if ends else 5, 5), *shared, nn.Linear(5, 3)]
        return rd.Chain(units).double()

    stages = [1] * len(ends) + [1, 1, 2, 1]
    pipes = build_both(make, stages=stages)
    assert equal(*[run(pipe, num_eager(len(stages)) + 10) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


def test_a_tick_that_cannot_be_recorded_stays_in_lockstep(caplog):
    caplog.set_level("WARNING", "redivider")
    pipes = build_both(lambda: around(Reading()))
    assert equal(*[run(pipe, 30) for pipe in pipes])
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())
    assert not pipes[0].execution.is_active
    said = [record.message for record in caplog.records if "not captured" in record.message]
    assert len(said) == 1
    assert "the host reads a number" in said[0] and "stage 2, unit 2" in said[0]


@pytest.mark.usefixtures("few")
def test_batch_norm_under_autocast_with_weights_cast_once():
    def make():
        couplings = [rd.Coupling(ConvNorm(4)) for _ in range(2)]
        stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), rd.Split(dim=1))
        units = [stem, *couplings, rd.Fuse("concat", dim=1), nn.Flatten(), nn.Linear(72, 3)]
        return rd.Chain(units).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    pipes = build_both(make, lr_lambda=rate)
    losses: list[list[Tensor | None]] = [[], []]
    for index in range(40):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, 3, 5, 5, generator=generator)
        target = torch.randint(3, (4,), generator=generator)
        for pipe, own in zip(pipes, losses, strict=True):
            if index == 33:  # the caller changes a weight between two updates
                with torch.no_grad():
                    next(pipe._chain.parameters()).mul_(0.9)
            with torch.autocast("cpu", torch.bfloat16):
                own.append(pipe.step(x, target).loss)
    assert pipes[0].execution.is_active
    assert equal(*losses)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())
    counted = pipes[0]._chain[0][1].num_batches_tracked
    assert counted == 40 - 2 * (len(pipes[0].stages) - 1)


def run_cast(pipes, number, dtype_at, change_at=()):
    """Return the losses of both under autocast; halve their weights before some ticks."""
    losses: list[list[Tensor | None]] = [[], []]
    for index, (x, target) in enumerate(batches(number)):
        for pipe, own in zip(pipes, losses, strict=True):
            if index in change_at:
                with torch.no_grad():
                    for param in pipe._chain.parameters():
                        param.mul_(0.5)
            with torch.autocast("cpu", dtype_at(index)):
                own.append(pipe.step(x.float(), target).loss)
    return losses


@pytest.mark.usefixtures("few")
def test_a_tick_under_another_autocast():
    pipes = build_both(lambda: around(MLP(8)).float())
    losses = run_cast(pipes, 40, lambda n: torch.float16 if n == 24 else torch.bfloat16)
    assert pipes[0].execution.is_active
    assert equal(*losses)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_changed_before_a_recording_that_fails(accumulate, caplog):
    caplog.set_level("INFO", "redivider")
    pipes = build_both(lambda: around(Reading()).float(), accumulate=accumulate)
    losses = run_cast(pipes, 36, lambda _: torch.bfloat16, change_at=range(10, 32))
    assert "recording one failed" in caplog.text
    assert equal(*losses)


def test_adam_is_made_what_a_capture_asks_for():
    weight = nn.Parameter(torch.zeros(2))
    chosen = torch.optim.AdamW([weight], fused=True)
    fuse(chosen)
    assert chosen.param_groups[0]["capturable"]
    other = torch.optim.AdamW([weight], foreach=True)
    fuse(other)
    assert not other.param_groups[0]["capturable"] and not other.param_groups[0]["fused"]


@pytest.mark.usefixtures("few")
def test_updates_wait_for_the_forward_of_their_stage():
    """Both read the weights; only the branch of the backward continues with the update."""
    order = []

    class Watched(Tape):
        def wait(self, lane, other):
            order.append((lane, other))
            super().wait(lane, other)

    pipe = build(CUTS[3])
    pipe.execution = CapturedRunner(pipe, Watched)
    run(pipe, num_eager(3) + 1)
    assert {(3, 0), (4, 1)} <= set(order)


def test_the_number_of_graphs_is_what_accumulation_needs():
    for accumulate, num in ((1, 8), (2, 8), (3, 9), (9, 9)):
        pipe = build(CUTS[2], accumulate=accumulate)
        run(pipe, num_eager(2, accumulate) + 1)
        assert len(pipe.execution._phases) == num


def test_the_first_step_of_an_optimizer_is_not_recorded():
    """It creates the optimizer's state, which a replay would create again."""
    pipes = [build(CUTS[2], accumulate=9, recorded=recorded) for recorded in (True, False)]
    assert equal(*[run(pipe, num_eager(2, 9) + 20) for pipe in pipes])
    assert pipes[0].execution.is_active
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())


@pytest.mark.usefixtures("few")
def test_rates_that_somebody_sets_are_those_of_recorded_ticks():
    pipes = build_both(network, stages=CUTS[3])
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(stage.optimizer, 0.98)
        for pipe in pipes
        for stage in pipe.stages
    ]
    for index, (x, target) in enumerate(batches(32)):
        losses = [pipe.step(x, target).loss for pipe in pipes]
        assert equal(*losses)
        for scheduler in schedulers if index > 4 else ():  # all have updated
            scheduler.step()
        if index == 20:  # a number instead of a tensor
            for pipe in pipes:
                pipe.stages[1].optimizer.param_groups[0]["lr"] = 0.01
    assert pipes[0].execution.is_active
    states = [pipe.full_state_dict() for pipe in pipes]
    assert equal(*states)
    assert float(pipes[0].stages[1].optimizer.param_groups[0]["lr"]) < 0.01
