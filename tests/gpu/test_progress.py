"""How far the GPU has come, as the host reads it."""

import pytest
import torch

from redivider.pipeline.runners import progress
from redivider.pipeline.runners.progress import Progress

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Work:
    """A transfer that ends on a stream of its own."""

    def __init__(self, cycles: int) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(cycles)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


@pytest.fixture(params=["the driver writes", "a kernel writes"])
def marks(request, monkeypatch) -> Progress:
    if request.param == "a kernel writes":
        monkeypatch.setattr(progress, "find_stream_write", lambda: None)
    marks = Progress(torch.device("cuda"))
    if request.param == "the driver writes":
        assert marks._main._write is not None
    return marks


def test_a_mark_is_passed_when_what_precedes_it_is_over(marks):
    first = marks.mark()
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)  # about a second
    second = marks.mark()
    assert first.has_passed() and not second.has_passed()
    torch.cuda.synchronize()
    assert second.has_passed()


def test_transfers_do_not_wait_for_what_the_gpu_computes(marks):
    works = [Work(10), Work(2 * 10**9)]
    torch.cuda._sleep(4 * 10**9)
    computed = marks.mark()
    ends = [marks.mark_behind(work) for work in works]
    works[0]._stream.synchronize()
    while not ends[0].has_passed():
        pass
    assert not ends[1].has_passed() and not computed.has_passed()
    marks._stream.synchronize()
    assert ends[1].has_passed() and not computed.has_passed()
    torch.cuda.synchronize()
    assert computed.has_passed()


def test_a_kernel_writes_what_the_driver_refuses(monkeypatch):
    monkeypatch.setattr(progress, "find_stream_write", lambda: lambda *args: 1)  # an error's number
    marks = Progress(torch.device("cuda"))
    mark = marks.mark()
    torch.cuda.synchronize()
    assert mark.has_passed()
