"""Messages that travel for halves of a tick: eager, captured and over processes, by one schedule.

The weights follow the equations, and all runners agree to the last bit.
"""

import random
import time
from typing import Any

import pytest
import torch
from support import captured
from support.oracle import equal
from support.pipelines import CUTS, batches, build, network, refer
from support.processes import cases, equalities
from support.processes.launch import launch
from support.reference import METHODS
from support.stateful import build as build_stateful
from support.stateful import feed

import redivider as rd

SLOW = pytest.mark.slow
BOUND = 1e-12


def follow(cut, method, accumulate, latency, **options) -> float:
    """Run the pipeline and the reference; return the largest distance of their weights."""
    model = network()
    reference = refer(model, cut, method, accumulate, latency, "sgd", **options)
    pipe = build(rd.Pipeline, model, cut, method, accumulate, latency, "sgd", **options)
    losses, distances = [], []
    for number in (pipe.schedule.num_in_flight + 5 * accumulate + 1, 5):
        for x, target in batches(number):
            reference.tick((x, target))
            losses.append(pipe.step(x, target).loss)
        distances.append(distance(model, reference))
        reference.flush()
        losses += [tick.loss for tick in pipe.flush()]
        distances.append(distance(model, reference))
    known = [loss.item() for loss in losses if loss is not None]
    assert known == pytest.approx(reference.losses, rel=1e-11)
    assert [stage.num_updates for stage in pipe.stages] == reference.updates
    return max(distances)


def distance(model, reference) -> float:
    true = reference.parameters()
    pairs = [(param.detach(), true[name].detach()) for name, param in model.named_parameters()]
    return max(float((param - other).norm() / other.norm()) for param, other in pairs)


@pytest.mark.parametrize(
    "stages, accumulate, latency",
    [
        (1, 2, 0.5),
        (2, 1, 0.5),
        (3, 2, 1.5),
        (5, 3, 0.5),
        pytest.param(3, 3, 2.5, marks=SLOW),
        pytest.param(5, 1, 1.5, marks=SLOW),
        pytest.param(5, 2, 2.5, marks=SLOW),
        pytest.param(10, 2, 0.5, marks=SLOW),
    ],
)
def test_petra(stages, accumulate, latency):
    assert follow(CUTS[stages], "petra", accumulate, latency) <= BOUND


@SLOW
@pytest.mark.parametrize(
    "method, accumulate, latency",
    [
        *((method, 2, 1.5) for method in METHODS if method != "petra"),
        ("dsp", 3, 0.5),
        ("exact-inverse", 3, 0.5),
    ],
)
def test_other_methods(method, accumulate, latency):
    assert follow(CUTS[3], method, accumulate, latency) <= BOUND


@pytest.mark.parametrize("latency", [[0.5, 1], [1.5, 0.5], pytest.param([2, 1], marks=SLOW)])
def test_a_latency_for_every_pair_of_neighbours(latency):
    assert follow(CUTS[3], "petra", 2, latency) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages, accumulate, latency",
    [(3, 1, 0.5), (5, 2, 0.5), pytest.param(3, 2, 1.5, marks=SLOW)],
)
def test_lookahead_and_rates_by_delay(stages, accumulate, latency):
    options = {"lookahead": True, "lr_by_delay": True}
    assert follow(CUTS[stages], "petra", accumulate, latency, **options) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages, accumulate, latency, options",
    [
        (2, 1, 0.5, {}),
        (5, 2, 0.5, {"lookahead": True}),
        pytest.param(3, 3, 1.5, {}, marks=SLOW),
        pytest.param(5, 1, [0.5, 1, 0.5, 1.5], {}, marks=SLOW),
        pytest.param(9, 2, 0.5, {"clip_norm": 0.1, "clip_over": "all"}, marks=SLOW),
        pytest.param(3, 2, 2.5, {"lookahead": True}, marks=SLOW),
        pytest.param(3, 3, 1.5, {"method": "dsp"}, marks=SLOW),
    ],
)
def test_captured_ticks_are_the_eager_ones(stages, accumulate, latency, options, monkeypatch):
    """The lanes of a tape run in any order that its waits allow."""
    # Recording takes longest; there are more phases where messages travel for longer.
    monkeypatch.setattr("redivider.pipeline.runners.captured.NUM_PHASES", 3)
    cut = captured.CUTS[stages]
    pipes = [
        captured.build(cut, accumulate=accumulate, latency=latency, recorded=recorded, **options)
        for recorded in (True, False)
    ]
    number = 2 * (pipes[0].schedule.num_in_flight + accumulate) + 12
    seen = [captured.run(pipe, number) for pipe in pipes]
    assert pipes[0].execution.is_active
    assert equal(*seen)
    assert equal(pipes[0].state_dict(), pipes[1].state_dict())
    assert equal(*(captured.run(pipe, number + 9, number) for pipe in pipes))
    ends = [[(tick.microbatch, tick.loss, tick.aux) for tick in pipe.flush()] for pipe in pipes]
    assert equal(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.5, pytest.param(1.5, marks=SLOW)])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_saved_after_any_tick_it_continues(at, latency, tmp_path):
    _, pipe = build_stateful(latency=latency)
    feed(pipe, 0, at)
    pipe.save(tmp_path / "state")
    _, other = build_stateful(seed=1, latency=latency)
    other.load(tmp_path / "state")
    assert equal(feed(other, at, 12), feed(pipe, at, 12))
    assert equal(other.state_dict(), pipe.state_dict())
    flushed = [[(t.microbatch, t.loss, t.aux) for t in one.flush()] for one in (pipe, other)]
    assert equal(*flushed)


@SLOW
@pytest.mark.parametrize("backend", ["gloo", "eager", "rendezvous", "device"])
def test_processes_compute_what_one_process_does(backend, tmp_path):
    settings: list[dict[str, Any]] = [
        {"latency": 0.5},
        {"latency": 1.5, "clip_norm": 0.5, "clip_over": "all"},
        {"latency": [0.5, 1, 0.5, 1.5], "stages": 5, "message_dtype": torch.bfloat16},
    ]
    if backend == "gloo":  # they differ in what a process computes, not in its messages
        settings += [
            {"latency": 0.5, "accumulate": 3, "stages": [1, 2, 3, 1, 2], "lookahead": True},
            {"latency": 0.5, "stages": [3, 2, 4], "method": "exact-inverse", "arithmetic": "fixed"},
        ]
    equalities.compare(settings, 3, backend, tmp_path)


@SLOW
@pytest.mark.parametrize(
    "backend, latency",
    [("gloo", 0.5), ("rendezvous", [1, 1, 0.5, 2])],
)
def test_saved_on_four_processes_it_continues_on_two_and_on_one(backend, latency, tmp_path):
    equalities.compare_saved({"stages": 5, "latency": latency}, backend, tmp_path)


def watch_sends(rank, latencies):
    """Return, by latency, whether gradients of weights were there when messages went down."""
    results = []
    for latency in latencies:
        pipe = rd.DistributedPipeline(cases.model(), **cases.options(latency=latency))
        params = [param for stage in pipe.stages for param in stage.module.parameters()]
        seen: list[bool] = []

        def watched(direction, message, send=pipe.transport.mail.send, seen=seen, params=params):
            if direction == "down":
                seen.append(any(param.grad is not None for param in params))
            send(direction, message)

        pipe.transport.mail.send = watched  # type: ignore[method-assign]
        cases.run(pipe, 0, 8)
        cases.finish(pipe)
        results.append((len(seen), set(seen)))
    return results


@pytest.mark.slow
def test_gradients_are_sent_before_those_of_weights_are_computed(tmp_path):
    """At half a tick the process below waits for them; else one backward computes both."""
    first, *others = launch(watch_sends, tmp_path, (0.5, 1), world_size=3)
    assert first == [(0, set()), (0, set())]
    assert others == [[(8, {False}), (8, {True})]] * 2


def sleep_now_and_then(rank, latencies, longest):
    dice = random.Random(rank)
    results = []
    for latency in latencies:
        pipe = rd.DistributedPipeline(cases.model(), **cases.options(latency=latency))
        for stage in pipe.stages:
            for name in ("run_forward", "run_backward", "finish_backward", "update"):
                setattr(stage, name, sleepy(getattr(stage, name), dice, longest))
        losses = cases.run(pipe, 0, 16) + cases.finish(pipe)
        results.append(([loss for _, loss in losses], pipe.full_state_dict()))
    return results


def sleepy(function, dice, longest):
    def sleep_and_call(*args, **kwargs):
        time.sleep(dice.uniform(0, longest))
        return function(*args, **kwargs)

    return sleep_and_call


@pytest.mark.slow
def test_stages_that_are_slow_now_and_then_change_nothing(tmp_path):
    latencies = (0.5, 1, 1.5)
    calm, *others = (
        launch(sleep_now_and_then, tmp_path / f"{longest}", latencies, longest, world_size=3)
        for longest in (0.0, 0.01)
    )
    for ours, theirs in ((a, b) for other in others for a, b in zip(calm, other, strict=True)):
        for (losses, weights), (same_losses, same_weights) in zip(ours, theirs, strict=True):
            assert losses == same_losses and cases.equal(weights, same_weights)
    assert len(calm[-1][0][0]) == 16
