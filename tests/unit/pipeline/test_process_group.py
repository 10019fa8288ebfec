"""The GPU and the backend that a process chooses; no GPU is needed."""

import faulthandler
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from redivider.pipeline.runners import process_group

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def choose(monkeypatch, devices: list[tuple[torch.device, str]]) -> list[bool]:
    """Return the answers of ranks on these devices, each with the identity of its GPU."""
    store = dist.HashStore()
    answers = []
    for rank in (*range(len(devices)), *range(len(devices))):  # all have to say it first
        device, uuid = devices[rank]
        properties = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        try:
            answers.append(process_group.have_own_gpus(store, rank, len(devices), device, 0.01))
        except RuntimeError:  # it waits for the others
            assert rank < len(devices) - 1
    return answers[-len(devices) :]


def test_nccl_is_taken_where_every_process_has_its_own_gpu(monkeypatch):
    """By the GPU's identity: each process may see one GPU alone, and call it the first."""
    assert choose(monkeypatch, [(GPU, "a"), (GPU, "b"), (GPU, "c")]) == [True] * 3
    assert choose(monkeypatch, [(GPU, "a"), (GPU, "b"), (GPU, "a")]) == [False] * 3
    assert choose(monkeypatch, [(GPU, "a"), (CPU, "")]) == [False] * 2


@pytest.mark.parametrize(
    "local, num, current, index",
    [(3, 4, 0, 3), (3, 1, 0, 0), (5, 4, 0, 1), (0, 4, 2, 2), (None, 4, 0, 0)],
)
def test_the_gpu_of_a_process(local, num, current, index, monkeypatch):
    """The one that was set, or else the one of its local rank."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert process_group.own_gpu() == torch.device("cuda", index)


@pytest.mark.parametrize(
    "config, device, backend",
    [
        ("cpu:gloo,cuda:nccl", GPU, "nccl"),  # of init_process_group() without a backend
        ("cpu:gloo,cuda:nccl", CPU, "gloo"),
        ("cuda:nccl", GPU, "nccl"),
        ("cpu:gloo,cuda:gloo", GPU, "gloo"),
        ("cuda:nccl", CPU, None),
    ],
)
def test_the_backend_is_the_one_of_the_device(config, device, backend, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    if backend is not None:
        assert process_group.backend_for(device) == backend
        return
    with pytest.raises(ValueError, match=r"no backend for it \(cuda:nccl\)"):
        process_group.backend_for(device)


def test_communicators_that_cannot_tell_have_not_failed():
    def refuse():
        raise RuntimeError("does not support getError")

    for backends, has_failed in (
        ([], False),
        ([SimpleNamespace(get_error=refuse)], False),
        ([SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"))], False),
        ([SimpleNamespace(get_error=lambda: SimpleNamespace(name="COMM_ERROR"))], True),
    ):
        assert process_group.Communicators(backends).have_failed() == has_failed


def test_an_abort_that_fails_leaves_no_timer(monkeypatch):
    calls = []
    later = "dump_traceback_later"
    monkeypatch.setattr(faulthandler, later, lambda *_, **__: calls.append("armed"))
    monkeypatch.setattr(faulthandler, f"cancel_{later}", lambda: calls.append("cancelled"))

    def refuse():
        raise AttributeError("abort")

    with pytest.raises(AttributeError):
        process_group.Communicators([SimpleNamespace(abort=refuse)]).abort(60.0, "it is over")
    assert calls == ["armed", "cancelled"]
