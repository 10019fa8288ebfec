"""Processes of a pipeline: which ranks form a replica, and how they wait for each other.

              column 0   column 1
    stage 0   rank 0     rank 4       a column is a replica: messages travel up and down a column,
    stage 1   rank 1     rank 5       gradients are averaged along a row
    stage 2   rank 2     rank 6
    stage 3   rank 3     rank 7

Every wait ends after `timeout` seconds, with an error that names a rank. With NCCL the GPU waits
and the host runs ahead. Where the host needs a result it polls, because it could not leave a
blocking call after a failure.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from redivider._torch_private import backend_of, default_store, prefix_store
from redivider.errors import Agreed, PipelineError
from redivider.pipeline.runners.heartbeat import Watch
from redivider.pipeline.runners.pending import PendingTransfer
from redivider.pipeline.runners.process_group import Communicators, backend_for, join
from redivider.pipeline.runners.progress import Mark, NoProgress, Progress
from redivider.pipeline.runners.torchrun import attempt

_num_teams = 0


class Team:
    """Position of this process among the others, and its waits and collectives.

    Args:
        mesh: Data (columns) x stage, or stages alone; None for all ranks in one column.
        device: Where the model is.
        timeout: Seconds to wait for another process.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device, timeout: float) -> None:
        global _num_teams
        join(device, timeout)
        num = dist.get_world_size()
        columns = torch.arange(num) if mesh is None else mesh.mesh
        columns = columns if columns.ndim > 1 else columns[None]
        if mesh is not None and mesh.mesh_dim_names not in (("data", "stage"), ("stage",)):
            raise ValueError(
                'the mesh must have the dimensions ("data", "stage") or ("stage",), got '
                f"{mesh.mesh_dim_names} of {tuple(mesh.mesh.shape)}"
            )
        if sorted(columns.flatten().tolist()) != list(range(num)):
            raise ValueError(
                f"the mesh must hold every rank once, got {columns.tolist()} of {num} ranks"
            )
        self.rank = dist.get_rank()
        self.column, self.place = (int(index) for index in (columns == self.rank).nonzero()[0])
        self.ranks = [int(rank) for rank in columns[self.column]]
        """Ranks of this column."""
        self.num_columns, self.num_places = len(columns), len(self.ranks)
        self.everyone = [int(rank) for rank in columns.flatten()]
        self.is_first = self.rank == self.everyone[0]
        self.stage_group = dist.group.WORLD if mesh is None else mesh.get_group("stage")
        self.data_group = mesh.get_group("data") if mesh is not None and mesh.ndim == 2 else None
        self.timeout = timeout
        self.backend = backend_for(device)
        self.batches = self.backend != "gloo"
        """Whether the backend matches by order, so that a tick's transfers begin in one batch."""
        self.device = device if self.batches else torch.device("cpu")
        """Device of the tensors that the backend sends."""
        self._on_gpu = waits_on_device(self.device)
        self._known: Exception | None = None  # error that the other processes know
        self._progress = Progress(self.device) if self._on_gpu else NoProgress()
        self._waits: deque[list[Callable[[], None]]] = deque([[]])  # by exchange
        shared = default_store()
        prefix = f"redivider-{attempt()}-{_num_teams}"
        self._store = prefix_store(prefix, shared)
        self.number = _num_teams
        _num_teams += 1
        groups: list[Any] = [dist.group.WORLD, self.stage_group, self.data_group]
        groups = list(dict.fromkeys(group for group in groups if group is not None))
        backends = [backend_of(group, self.device) for group in groups if self._on_gpu]
        communicators = Communicators(backends, self.device)
        self.watch = Watch(self._store, self.rank, self.everyone, timeout, communicators)
        if self.batches:
            with self.guarding():
                self._connect(groups)

    @property
    def is_last(self) -> bool:
        """Whether the loss is here."""
        return self.place == self.num_places - 1

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Report an error of this process to all others, and raise an error of theirs."""
        if sys.exception() is None:
            self._known = None  # an error keeps the memory of its frames
        try:
            self.watch.raise_failure()
            yield
            self.watch.raise_failure()
        except Exception as error:
            known = self._known
            # A caller may raise a known error again, in words of its own.
            is_known = known is not None and known in (error, error.__cause__)
            if is_known or isinstance(error, Agreed):
                raise
            cause = self._find_cause()
            notes = ", ".join(getattr(error, "__notes__", []))
            text = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
            if cause is None and not isinstance(error, PipelineError):
                self.watch.publish(f"{self.watch.name(self.rank)}: {text}")
            elif cause is not None and str(cause).endswith(text):
                cause = None  # all ranks have the same error, and each raises its own
            self.watch.fail()
            self._known = cause or error
            if cause is not None:
                raise cause from error
            raise

    def note_agreed(self, error: Exception) -> None:
        """Note an error that all processes raise alike, and after which they may continue."""
        self._known = error

    def _find_cause(self) -> PipelineError | None:
        """Return the failure of another process that may have caused an error here, if any.

        An aborted transfer leaves arbitrary numbers in GPU memory, and the loss may be NaN from
        them.
        """
        self.watch.wait_for_reason()
        return self.watch.heard

    def name_stages(self, place: int, stages: str) -> None:
        """Register which stages the ranks at a place hold, for error messages."""
        for column in range(self.num_columns):
            self.watch.stages[self.everyone[column * self.num_places + place]] = stages

    def wait(self, work: Any, rank: int | None = None) -> None:
        """Wait for a transfer with a rank, or for a collective; on a GPU, queue the wait."""
        with self.watch.waiting_for(rank):
            if self._on_gpu:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))

    def finish(self, work: Any, rank: int | None = None) -> None:
        """Wait on the host, and raise if the transfer has failed."""
        with self.watch.waiting_for(rank):
            if self._on_gpu:
                self._poll(work.is_completed)
            work.wait(timedelta(seconds=self.timeout))
            self.watch.raise_failure()  # an aborted transfer counts as completed, too

    def mark(self) -> Mark:
        """Mark this point of the GPU's work."""
        return self._progress.mark()

    def follow(self, works: Sequence[Any], rank: int | None, start: Mark) -> None:
        """Register transfers that the host does not wait for now, for `catch_up` and the watch.

        The GPU begins them after `start`.
        """
        for work in works:
            if self._on_gpu:
                self._follow(PendingTransfer(rank, start, self._progress.mark_behind(work)))
            else:
                self._waits[-1].append(partial(self.finish, work, rank))

    def _follow(self, transfer: PendingTransfer) -> None:
        self._waits[-1].append(partial(self._await, transfer))
        self.watch.follow(transfer)

    def _await(self, transfer: PendingTransfer) -> None:
        """Wait on the host until the GPU has passed a transfer.

        A failed transfer is not passed until the watch has found the reason and aborts it.
        """
        with self.watch.waiting_for(transfer.rank):
            # The host is ticks ahead: a long pause costs the GPU nothing, and few polls little.
            self._poll(transfer.end.has_passed, longest=1e-3)
            self.watch.raise_failure()

    def catch_up(self, ticks: int = 0) -> None:
        """Wait on the host for all registered transfers except those of the last few ticks."""
        self._waits.append([])
        while len(self._waits) > ticks + 1:
            for wait in self._waits.popleft():
                wait()

    def put_note(self, key: str, text: str) -> None:
        """Write a text to the store, for another rank."""
        with self.watch.waiting_for(None):
            self._store.set(f"note {key}", text)

    def take_note(self, key: str, rank: int) -> str:
        """Return the text that a rank writes under this key, and delete it; wait for it."""
        key = f"note {key}"
        with self.watch.waiting_for(rank):
            self._poll(lambda: self._store.check([key]), longest=5e-3)
            text: str = self._store.get(key).decode()
            self._store.delete_key(key)
        return text

    def _poll(self, is_done: Callable[[], bool], longest: float = 2e-4) -> None:
        """Poll until done, with pauses that grow up to `longest` seconds."""
        deadline, pause = time.monotonic() + self.timeout, 5e-5
        while not is_done():
            self.watch.raise_failure()
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _connect(self, groups: Sequence[Any]) -> None:
        """Create all communicators now: torch requires every rank in a group's first operation."""
        for group in groups:
            flag = torch.zeros(1, device=self.device)
            with self.watch.waiting_for(None):
                try:
                    work = dist.all_reduce(flag, group=group, async_op=True)
                except dist.DistBackendError as error:
                    why = str(error).strip().splitlines()[-1]
                    reason = f"rank {self.rank}: {self.backend} cannot connect the processes: {why}"
                    raise PipelineError(self.watch.publish(reason)) from error
            self.finish(work)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the replicas of a stage, in place."""
        if self.data_group is None or self.num_columns == 1 or not tensors:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            bucket = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self.device)
            work = dist.all_reduce(flat, group=self.data_group, async_op=True)
            self._finish_collective(work, is_for_host=bucket[0].device.type == "cpu")
            flat.div_(self.num_columns)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def broadcast_to_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the tensors of the first replica to the others."""
        if self.data_group is None or self.num_columns == 1:
            return
        source = self.everyone[self.place]
        for tensor in tensors:
            self._broadcast(tensor, source, self.data_group)

    def broadcast_in_column(self, tensor: Tensor, place: int) -> None:
        """Broadcast a tensor of one rank to the others of its column."""
        self._broadcast(tensor, self.ranks[place], self.stage_group)

    def _broadcast(self, tensor: Tensor, source: int, group: Any) -> None:
        sent = tensor.detach().to(self.device).contiguous()
        if sent.numel():  # as bytes: backends do not know all dtypes
            data = sent.reshape(-1).view(torch.uint8)
            work = dist.broadcast(data, source, group=group, async_op=True)
            self._finish_collective(work, source, is_for_host=tensor.device.type == "cpu")
        if self.rank != source:
            tensor.detach().copy_(sent)

    def gather(self, tensor: Tensor, *, in_column: bool = False) -> list[Tensor]:
        """Return the tensors of all ranks, or of a column, in mesh order, on its device."""
        group = self.stage_group if in_column else None
        sent = tensor.detach().to(self.device)
        numbers = dist.get_process_group_ranks(group)
        gathered = [torch.empty_like(sent) for _ in numbers]
        work = dist.all_gather(gathered, sent, group=group, async_op=True)
        self._finish_collective(work, is_for_host=tensor.device.type == "cpu")
        order = self.ranks if in_column else self.everyone
        return [gathered[numbers.index(rank)].to(tensor.device) for rank in order]

    def _finish_collective(
        self, work: Any, rank: int | None = None, *, is_for_host: bool = False
    ) -> None:
        """Wait for a collective, on the host if its result is wanted there."""
        if is_for_host or not self._on_gpu:
            self.finish(work, rank)
        else:
            start = self.mark()
            self.wait(work, rank)
            self._follow(PendingTransfer(rank, start, self.mark()))

    def gather_text(self, text: str, *, in_column: bool = False) -> list[str]:
        """Return the texts of all ranks, or of a column, in mesh order."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else None
        size = torch.tensor([0 if data is None else len(data)])
        sizes = [int(length) for length in self.gather(size, in_column=in_column)]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        if data is not None:
            padded[: len(data)] = data
        rows = self.gather(padded, in_column=in_column)
        pairs = zip(rows, sizes, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in pairs]

    def max_over_ranks(self, number: float) -> float:
        """Return the largest of all ranks' numbers."""
        numbers = self.gather(torch.tensor([number], dtype=torch.float64))
        return max(map(float, numbers))


def waits_on_device(device: torch.device) -> bool:
    """Return whether a wait is queued on the device while the host runs ahead."""
    return device.type == "cuda"
