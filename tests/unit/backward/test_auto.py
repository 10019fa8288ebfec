"""`backward="auto"`, and the errors of a capture without a GPU."""

import copy
import logging
import pickle
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.networks import MLP, Attention, vector_chain
from support.oracle import gradients, weigh, worst_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import redivider as rd
from redivider.backward import auto
from redivider.backward.auto import NUM_COUPLINGS, before_capture, faster, time_row
from redivider.backward.strategy import begin_pass


class Clock:
    """Stand-in for a stopwatch, whose seconds a test sets; it runs the function all the same."""

    seconds_of = {"reverse": 1.0, "overlap": 1.0}  # noqa: RUF012
    calls: list[tuple[str, bool]] = []  # noqa: RUF012

    def __init__(self, run, *, on_gpu, ahead):
        self.run, self.ahead, self.seconds = run, ahead, []

    def __call__(self, strategy):
        Clock.calls.append((strategy, self.ahead))
        self.run(strategy)
        self.seconds.append(Clock.seconds_of[strategy])


@pytest.fixture
def clock(monkeypatch):
    """Let "auto" choose on the CPU as on a GPU, by times that the test sets."""
    monkeypatch.setattr(auto, "_may_overlap", lambda couplings, streams: len(couplings) > 1)
    monkeypatch.setattr(auto, "Stopwatch", Clock)
    monkeypatch.setattr(auto, "_num_retries", lambda: 0)
    monkeypatch.setattr(Clock, "seconds_of", {"reverse": 1.0, "overlap": 0.5})
    monkeypatch.setattr(Clock, "calls", [])
    return Clock


@pytest.mark.parametrize(
    ("overlap", "choice"), [(0.9, "overlap"), (1.1, "reverse"), (1, "reverse"), (0.995, "reverse")]
)
def test_the_faster_one_stays(clock, caplog, overlap, choice):
    caplog.set_level(logging.INFO, "redivider")
    clock.seconds_of["overlap"] = overlap
    chain = vector_chain(depth=3, backward="auto")
    for _ in range(3):
        weigh(chain(torch.randn(5, 6))).backward()
    assert chain._auto is not None
    assert [*chain._auto.choices.values()] == [choice]
    assert len(caplog.records) == 1, "it is timed once"
    message = caplog.records[0].message
    assert repr(choice) in message and "unit 2" in message and f"{1000 * overlap:.2f} ms" in message


def test_every_row_shape_and_flag_has_a_choice_of_its_own(clock):
    units = [nn.Linear(6, 8), rd.Duplicate(), *couplings(2), rd.Fuse("add")]
    chain = rd.Chain([*units, rd.Duplicate(), *couplings(3)], backward="auto").double()
    x = torch.randn(4, 5, 6).double()
    chain(x)
    assert chain._auto is not None
    assert len(chain._auto.choices) == 2
    chain(x)
    assert len(chain._auto.choices) == 2
    chain(x[:2])
    assert len(chain._auto.choices) == 4
    with before_capture():
        chain(x)
    assert len(chain._auto.choices) == 6
    chain.eval()(x)
    assert len(chain._auto.choices) == 8
    with torch.no_grad():
        chain(x[:1])
    assert len(chain._auto.choices) == 8


def test_strategies_take_turns_and_the_host_runs_ahead_before_a_capture(clock):
    """Seen on a GPU: 8 % faster just after it was idle, for longer than one strategy was timed."""
    row = couplings(2)
    streams = torch.randn(4, 5, 8).double(), torch.randn(4, 5, 8).double()
    time_row(row, streams, [{}, {}], rd.Chain(row).arithmetic)
    assert clock.calls[:4] == [("reverse", False), ("overlap", False)] * 2
    with before_capture():
        time_row(row, streams, [{}, {}], rd.Chain(row).arithmetic)
    assert clock.calls[-1] == ("overlap", True)


@pytest.mark.parametrize("scarce", ["reverse", "overlap"])
def test_a_strategy_that_does_not_fit_is_not_taken(clock, monkeypatch, scarce):
    def begin(strategies, units, x, begin=begin_pass):
        if strategies[0].overlaps == (scarce == "overlap"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(strategies, units, x)

    row = couplings(2)
    streams = torch.randn(4, 5, 8).double(), torch.randn(4, 5, 8).double()
    monkeypatch.setattr(auto, "begin_pass", begin)
    error = pytest.raises(torch.OutOfMemoryError) if scarce == "reverse" else nullcontext()
    with error:
        times = time_row(row, streams, [{}, {}], rd.Chain(row).arithmetic)
        assert times["overlap"] == float("inf") and faster(times) == "reverse"


def test_overlap_is_not_taken_where_memory_is_short(clock, monkeypatch):
    retries = iter(range(1000))
    monkeypatch.setattr(auto, "_num_retries", lambda: next(retries))
    chain = vector_chain(depth=3, backward="auto")
    chain(torch.randn(5, 6))
    assert chain._auto is not None
    assert [*chain._auto.choices.values()] == ["reverse"]


class Counting(nn.Module):
    """Layer with buffers that every run changes, random numbers, and a keyword."""

    runs: torch.Tensor

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x, shift=None):
        if not hasattr(self, "runs"):
            self.register_buffer("runs", torch.zeros(()))
        self.runs += 1
        y = self.linear(nn.functional.dropout(self.norm(x), 0.3, self.training))
        return y if shift is None else y + shift


def couplings(num):
    return [rd.Coupling((Attention if i % 2 else MLP)(8)).double() for i in range(num)]


def counting_chain(backward):
    torch.manual_seed(3)
    units = [rd.Coupling(Counting(), takes=("shift",)) for _ in range(NUM_COUPLINGS + 2)]
    return rd.Chain([nn.Linear(6, 8), rd.Duplicate(), *units, rd.Fuse()], backward=backward)


def train(chain, *, with_checkpoint=False, autocast=False, tied=False):
    """Return losses, gradients and buffers after two steps, and the next random number."""
    torch.manual_seed(4)
    shift = torch.rand(1, 8, requires_grad=True)
    results: list[Any] = []
    for _ in range(2):
        x = torch.randn(5, 6, requires_grad=True)
        if tied:
            shift = chain[2].f.linear.weight.square().mean(0, keepdim=True)
            shift.retain_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if with_checkpoint:
                y = checkpoint(chain, x, shift=shift, use_reentrant=False)
            else:
                y = chain(x, shift=shift)
        weigh(y).backward()
        results += [x.grad]
    grads = [param.grad for param in chain.parameters()]
    return [*results, shift.grad, *grads, *chain.buffers(), torch.rand(1)]


@pytest.mark.parametrize("arithmetic", ["float", "fixed"])
@pytest.mark.parametrize(
    "options", [{}, {"with_checkpoint": True}, {"autocast": True}, {"tied": True}], ids=str
)
def test_timing_leaves_no_trace(clock, options, arithmetic):
    chain, other = counting_chain("auto"), counting_chain("reverse")
    chain.arithmetic = other.arithmetic = arithmetic
    results = zip(train(chain, **options), train(other, **options), strict=True)
    assert all(torch.equal(*pair) for pair in results)
    assert len(clock.calls) >= 14


def test_rows_that_wait_for_other_ranks_are_not_timed():
    streams: Any = (SimpleNamespace(is_cuda=True),)
    row = couplings(2)
    assert auto._may_overlap(row, streams)
    row[1].f = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    assert not auto._may_overlap(row, streams)


def test_threads_time_in_turns(clock, monkeypatch):
    """Each would restore buffers that the other one spends."""
    row = [rd.Coupling(nn.BatchNorm1d(8)) for _ in range(2)]
    originals = [dict(module._buffers) for coupling in row for module in coupling.modules()]
    monkeypatch.setattr(Clock, "__call__", lambda self, strategy: time.sleep(0.01))
    monkeypatch.setattr(auto, "median", lambda values: 1.0)
    streams = torch.randn(4, 8), torch.randn(4, 8)
    arguments: Any = row, streams, [{}, {}], rd.Chain(row).arithmetic
    threads = [threading.Thread(target=time_row, args=arguments) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.005)  # the others begin and end in the middle of this one
    for thread in threads:
        thread.join()
    buffers = [module._buffers for coupling in row for module in coupling.modules()]
    pairs = zip(buffers, originals, strict=True)
    assert all(own[name] is buffer for own, before in pairs for name, buffer in before.items())


def test_frozen_rows_and_plain_inputs_are_timed(clock):
    chain = vector_chain(depth=3, backward="auto").requires_grad_(False)
    chain(torch.randn(5, 6))
    assert chain._auto is not None and len(chain._auto.choices) == 1


def test_on_the_cpu_auto_is_reverse():
    chain = vector_chain(depth=3, backward="auto")
    other = copy.deepcopy(chain)
    other.backward = "reverse"
    x = torch.randn(5, 6)
    for model in (chain, other):
        weigh(model(x)).backward()
    assert worst_error(gradients(chain), gradients(other)) == 0
    assert chain._auto is not None and not chain._auto.choices
    pickle.loads(pickle.dumps(chain))


def test_a_copy_chooses_for_itself(clock):
    chain = vector_chain(depth=3, backward="auto")
    chain(torch.randn(5, 6))
    other = copy.deepcopy(chain)
    assert chain._auto is not None and chain._auto.choices
    assert other._auto is not None and not other._auto.choices


def test_a_capture_without_a_gpu_says_so():
    with pytest.raises(rd.CaptureError, match=r"on a CUDA device, .* not on cpu"):
        rd.capture(lambda x: x.sum(), torch.ones(3))
    with pytest.raises(rd.CaptureError, match="takes tensors, got int"):
        rd.capture(lambda x, n: x.sum(), (torch.ones(3), 3))
