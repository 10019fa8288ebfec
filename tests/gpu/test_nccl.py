"""Ranks that talk by NCCL, several on one GPU: the numbers of a pipeline in one process.

They are equal to the last bit, since the kernels are the same. Ranks are run as those of several
machines would be, through sockets (see `nccl_env`).
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import cases, equalities
from support.processes.cases import batch, equal, finish, model, options, run
from support.processes.failures import CASES, meet
from support.processes.launch import launch
from support.processes.torchrun import kill_one, listen, small, start
from support.reference import METHODS
from support.training import REVNET
from torch import nn

import redivider as rd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cuda")


def test_two_ranks(tmp_path):
    settings: list[dict[str, Any]] = [{"method": method} for method in METHODS]
    settings += [
        {"accumulate": 3, "latency": 2},
        {"stages": [1, 2, 3, 1, 2], "accumulate": 3, "latency": 3},
        {"arithmetic": "fixed", "clip_norm": 0.5, "clip_over": "all"},
        {"lookahead": True, "latency": 2, "lr_by_delay": True},
        {"message_dtype": torch.bfloat16, "stages": [3, 6]},
        {"message_dtype": torch.int8, "stages": 5},
        {"latency": 0.5, "accumulate": 3},
        {"latency": 1.5, "stages": 5, "lookahead": True},
    ]
    equalities.compare(settings, 2, "nccl", tmp_path)


def test_three_ranks(tmp_path):
    settings: list[dict[str, Any]]
    settings = [{"accumulate": k, "latency": latency} for k in (1, 3) for latency in (1, 2, 3)]
    settings += [
        {"stages": [4, 1, 4], "accumulate": 3, "clip_norm": 0.5},
        {"stages": 9, "latency": 2, "method": "delayed"},
        {"latency": 0.5, "clip_norm": 0.5, "clip_over": "all"},
        {"latency": [0.5, 1], "accumulate": 3},
    ]
    equalities.compare(settings, 3, "nccl", tmp_path)


def test_four_ranks(tmp_path):
    settings = [
        {"accumulate": 3},
        {"stages": [1, 3, 2, 1, 1, 1], "latency": 2, "method": "exact-inverse"},
        {"stages": 7, "clip_norm": 0.5, "clip_over": "all", "accumulate": 3},
        {"message_dtype": torch.int8, "latency": 3},
        {"stages": 7, "latency": 0.5, "accumulate": 3},
    ]
    equalities.compare(settings, 4, "nccl", tmp_path)


def test_evaluation_while_the_pipeline_fills(tmp_path):
    equalities.compare_evaluations("nccl", tmp_path)


def test_side_inputs_of_dtypes_that_nccl_does_not_know(tmp_path):
    equalities.compare_side_inputs("nccl", tmp_path)


def test_two_pipelines_in_the_same_processes(tmp_path):
    equalities.compare_two_pipelines("nccl", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 5, "latency": 2},
        {"stages": 5, "latency": 0.5},
        {"stages": [1, 2, 2, 2, 2], "accumulate": 3},
    ],
    ids=str,
)
def test_saved_on_four_ranks_it_goes_on_on_two_and_on_one(changes, tmp_path):
    equalities.compare_saved(changes, "nccl", tmp_path)


@pytest.mark.parametrize("norm", [True, False])
def test_replicas(norm, tmp_path):
    equalities.compare_replicas(norm, "nccl", tmp_path)


class Scale(nn.Module):
    """Little work on much data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return torch.tanh(x) * self.weight


WIDE = 2**17


def large(num: int, width: int = WIDE) -> rd.Chain:
    """Two streams of 32 MB: a message is 64 MB upwards, 128 MB downwards."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(Scale(width)) for _ in range(num)]
    return rd.Chain([rd.Duplicate(), *couplings, rd.Fuse("mean")]).cuda()


def train_large(
    pipe, width: int = WIDE, num: int = 9, *, is_captured: bool = False
) -> tuple[list, dict]:
    losses = []
    for n in range(num):
        generator = torch.Generator("cuda").manual_seed(n)
        x = torch.randn(64, width, generator=generator, device="cuda")
        losses.append(pipe.step(x, x.roll(1)).loss)
    assert pipe.execution.is_active == is_captured
    losses += [tick.loss for tick in pipe.flush(update=True)]
    return [float(loss) for loss in losses if loss is not None], pipe.full_state_dict()


def large_messages(rank, changes):
    pipe = rd.DistributedPipeline(large(4), **options(loss=F.mse_loss, **changes))
    return train_large(pipe)


@pytest.mark.parametrize("latency, dtype", [(1, None), (2, None), (1, torch.int8)])
def test_messages_of_64_megabytes(latency, dtype, tmp_path):
    """They exceed NCCL's buffers by far: a send is over when it is received."""
    changes = {"latency": latency, "message_dtype": dtype}
    results = launch(large_messages, tmp_path, changes, world_size=3, backend="nccl")
    pipe = rd.Pipeline(large(4), stages=3, **options(loss=F.mse_loss, **changes))
    losses, weights = train_large(pipe)
    assert len(losses) == 9 and results[-1][0] == losses
    assert all(equal(full, weights) for _, full in results)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_captured_ticks(backend, tmp_path):
    settings = [
        {},
        {"latency": 0.5, "accumulate": 2},
        {"latency": 2, "stages": 5, "clip_norm": 0.05, "clip_over": "all"},
        {"latency": [0.5, 1, 1.5], "stages": 4, "lookahead": True, "share_loss": True},
        {"latency": 0.5, "message_dtype": torch.int8},
        {"latency": 2, "message_dtype": torch.bfloat16, "accumulate": 2},
    ]
    equalities.compare_captured(settings, 3, backend, tmp_path)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_captured_ticks_of_replicas(backend, tmp_path):
    settings = [
        {"replicas": 2, "latency": 0.5, "accumulate": 2},
        {"replicas": 2, "stages": 3, "clip_norm": 0.05, "clip_over": "all"},
    ]
    equalities.compare_captured(settings, 4, backend, tmp_path)


def captured_large_messages(rank):
    """Train with messages that are sent from the memory of a graph, without a copy."""
    results = []
    for capture in (False, True):
        changes = {"loss": F.mse_loss, "capture": capture, "optimizer": equalities.fused_sgd}
        pipe = rd.DistributedPipeline(large(4, 2**15), **options(**changes))
        results.append(train_large(pipe, 2**15, 40, is_captured=capture))
    return results


def test_captured_ticks_send_large_messages(tmp_path):
    results = launch(captured_large_messages, tmp_path, world_size=3, backend="nccl")
    for eager, captured in results:
        assert eager[0] == captured[0] and equal(eager[1], captured[1])
    assert len(results[-1][0][0]) == 40


def without_a_backend(rank):
    """As a user may write it: torch takes NCCL for GPUs, and gloo for the host."""
    pipe = rd.DistributedPipeline(model(), device="cuda", **options())
    losses = run(pipe, 0, 12) + finish(pipe)
    return pipe.team.backend, str(pipe.team.device), losses, pipe.full_state_dict()


def test_a_group_without_a_backend_and_a_device_without_an_index(tmp_path):
    results = launch(without_a_backend, tmp_path, backend="cpu:gloo,cuda:nccl")
    pipe = rd.Pipeline(model(), stages=2, **options())
    run(pipe, 0, 12)
    finish(pipe)
    for backend, device, _, full in results:
        assert (backend, device) == ("nccl", "cuda:0")
        assert equal(full, pipe.full_state_dict())


def ahead(rank):
    """Return how many ticks the host queues while the GPU is in its first one."""
    pipe = rd.DistributedPipeline(model(), **options(latency=2))
    batches = [batch(n) for n in range(40)]
    num = 0
    for n, (x, target, mask) in enumerate(batches):
        if n == 8:
            torch.cuda.synchronize()
            torch.cuda._sleep(2 * 10**9)  # about a second
            event = torch.cuda.Event()
            event.record()
        num += n > 8 and not event.query()
        pipe.step(x, target, mask=mask)
    finish(pipe)
    return num


def test_the_host_runs_ahead_of_the_gpu(tmp_path):
    """By the latency and two ticks; then it waits, so that messages do not pile up.

    The last rank reads every loss before it goes on.
    """
    first, last = launch(ahead, tmp_path, backend="nccl")
    assert 2 <= first <= 5 and last <= 1, (first, last)


def on_the_same_gpu(rank):
    os.environ["NCCL_HOSTID"] = "one machine"
    with pytest.raises(rd.PipelineError) as caught:
        rd.DistributedPipeline(model(), timeout=20, **options())
    return str(caught.value)


def test_ranks_that_nccl_does_not_connect_say_why(tmp_path):
    pattern = r"rank \d: nccl cannot connect the processes: .*[Dd]uplicate GPU"
    for message in launch(on_the_same_gpu, tmp_path, backend="nccl"):
        assert re.match(pattern, message), message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_ranks_end(case, tmp_path):
    meet(case, tmp_path, "nccl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = folder / "recipe.json"
    recipe.write_text(small(device="cuda", capture=False, **REVNET).to_json())
    process = start(2, "train", str(recipe), "--out", str(folder / "run"), backend="nccl")
    output = listen(process)
    assert process.returncode == 0, output
    return folder / "run"


@pytest.mark.parametrize("number", range(int(os.environ.get("REDIVIDER_STRESS", "2"))))
def test_a_rank_is_killed_and_all_go_on(number, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kill_one(number, str(whole.parent / "recipe.json"), whole, "nccl")
