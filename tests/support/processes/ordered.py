"""A backend for the CPU that matches messages by their order alone, as NCCL does.

A group works in the order of its calls: a batch, or a collective, begins when the one before it is
over. "eager": a send is over as soon as it has begun, as for small messages that fit into NCCL's
buffers. "rendezvous": it is over when it is received. "device": the same, and the pipeline takes
the CPU for a GPU: waits have no limit, and end when the group is aborted, whatever has arrived.
Queries of the device wait for a lock, which `load_kernel` holds until nothing runs there.
A receive buffer holds NaN until its message has arrived.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from redivider.pipeline.runners import topology
from redivider.pipeline.runners.progress import NoProgress

MODES = ("eager", "rendezvous", "device")
driver = threading.Lock()


class Done(dist.Work):
    """A job of a group's thread."""

    def __init__(self, job: Callable[[], Any]) -> None:
        super().__init__()
        self._job, self._event = job, threading.Event()
        self.error: Exception | None = None
        self.left_the_device = threading.Event()  # a failed job stays there until it is aborted

    def run(self) -> None:
        try:
            self._job()
            self.left_the_device.set()
        except Exception as error:
            self.error = error
        self._event.set()

    def end(self) -> None:
        self.left_the_device.set()
        self._event.set()

    def is_completed(self) -> bool:
        with driver:
            return self._event.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:  # the device waits
            return self.left_the_device.wait()
        if not self._event.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error
        return True


class Ordered(dist.ProcessGroup):
    """Transfers by gloo, whose tags count the messages between two ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, mode: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._is_eager = mode == "eager"
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._jobs: queue.Queue[Done] = queue.Queue()
        self._leaving: list[Any] = []
        self._works: list[Done] = []
        self._is_aborted = False
        self._batch: list[Callable[[], Any]] | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get().run()

    def _queue(self, job: Callable[[], Any]) -> Done:
        if self._is_aborted:
            raise dist.DistBackendError("the communicator was aborted")
        work = Done(job)
        self._works = [w for w in self._works if not w.left_the_device.is_set()] + [work]
        self._jobs.put(work)
        return work

    def batch(self, ops: list[dist.P2POp], begin: Callable[..., Any]) -> list[Done]:
        """Begin transfers together, by torch's own function, which calls `send` and `recv`."""
        starts: list[Callable[[], Any]] = []
        self._batch = starts
        begin(ops)
        self._batch = None
        return [
            self._queue(lambda: [work.wait() for work in [start() for start in starts] if work])
        ]

    def send(  # type: ignore[override]
        self, tensors: Any, rank: int, tag: int
    ) -> None:
        assert self._batch is not None
        tag = self._num_sent[rank]
        self._num_sent[rank] += 1
        sent = [tensor.clone() for tensor in tensors] if self._is_eager else tensors

        def start() -> Any:
            work = self._gloo.send(sent, rank, tag)
            if not self._is_eager:
                return work
            self._leaving.append((sent, work))

        self._batch.append(start)

    def recv(  # type: ignore[override]
        self, tensors: Any, rank: int, tag: int
    ) -> None:
        assert self._batch is not None
        tag = self._num_received[rank]
        self._num_received[rank] += 1
        for tensor in tensors:
            tensor.fill_(255)  # bytes
        self._batch.append(lambda: self._gloo.recv(tensors, rank, tag))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        return self._queue(lambda: self._gloo.allgather(outputs, inputs).wait())

    def allreduce(self, tensors: Any, options: Any) -> Done:  # type: ignore[override]
        return self._queue(lambda: self._gloo.allreduce(tensors, options).wait())

    def broadcast(self, tensors: Any, options: Any) -> Done:  # type: ignore[override]
        return self._queue(lambda: self._gloo.broadcast(tensors, options).wait())

    def barrier(self, options: Any) -> Done:  # type: ignore[override]
        return self._queue(lambda: self._gloo.barrier(options).wait())

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _group_start(self) -> None:
        pass

    def _group_end(self) -> None:
        pass

    def get_error(self) -> SimpleNamespace:
        has_failed = any(work.error is not None for work in tuple(self._works))
        return SimpleNamespace(name="COMM_ERROR" if has_failed else "SUCCESS")

    def load_kernel(self) -> None:
        """Wait until nothing runs on the device, and block queries of it meanwhile."""
        with driver:
            for work in tuple(self._works):
                work.left_the_device.wait()

    def abort(self) -> None:
        """End all waits, and refuse new jobs."""
        self._is_aborted = True
        for work in self._works:
            work.end()

    def shutdown(self) -> None:
        """Wait until all messages have left, as NCCL does when a group is destroyed."""
        for _, work in self._leaving:
            work.wait()

    def getBackendName(self) -> str:
        return "ordered"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name


class Progress:
    """Marks in the work of a device that computes at once, and marks behind its transfers."""

    def __init__(self, device: torch.device) -> None:
        pass

    def mark(self) -> NoProgress:
        return NoProgress()

    def mark_behind(self, work: Done) -> SimpleNamespace:
        return SimpleNamespace(has_passed=work.left_the_device.is_set)


def register(backend: str) -> None:
    """Register the backends in this process, and give them whole batches of transfers."""
    if backend == "device":
        topology.waits_on_device = lambda device: True
        vars(topology)["Progress"] = Progress
    for mode in MODES:

        def make(store: Any, rank: int, size: int, timeout: timedelta, mode: str = mode) -> Ordered:
            return Ordered(store, rank, size, timeout, mode)

        dist.Backend.register_backend(mode, make, devices=["cpu"])
    begin = dist.batch_isend_irecv

    def batch(ops: list[dist.P2POp]) -> list[Any]:
        group = ops[0].group
        return group.batch(ops, begin) if isinstance(group, Ordered) else begin(ops)

    dist.batch_isend_irecv = batch  # type: ignore[assignment]
