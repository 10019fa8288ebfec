"""The processes of a pipeline: a column of ranks for each replica, the stages of one in a column.

            stage 0  1  2  3
    data 0  rank  0  1  2  3     messages travel along a row,
    data 1  rank  4  5  6  7     gradients are averaged down a column of this table

Whoever waits for another waits for `timeout` seconds at most, and then says for whom. Over NCCL the
GPU waits, and the host goes on; the host waits where it needs the result, and then by asking again
and again: a call that blocks could not be left.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from redivider.errors import PipelineError
from redivider.pipeline.runners.heartbeat import Watch

_num_teams = 0


class Team:
    """This process among the others.

    Args:
        mesh: Data x stage, or stages alone; None for all ranks in one column.
        device: Where the model is.
        timeout: Seconds to wait for another process.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device, timeout: float) -> None:
        global _num_teams
        join(device, timeout)
        num = dist.get_world_size()
        table = torch.arange(num) if mesh is None else mesh.mesh
        table = table if table.ndim > 1 else table[None]
        if mesh is not None and mesh.mesh_dim_names not in (("data", "stage"), ("stage",)):
            raise ValueError(
                'the mesh must have the dimensions ("data", "stage") or ("stage",), got '
                f"{mesh.mesh_dim_names} of {tuple(mesh.mesh.shape)}"
            )
        if sorted(table.flatten().tolist()) != list(range(num)):
            raise ValueError(
                f"the mesh must hold every rank once, got {table.tolist()} of {num} ranks"
            )
        self.rank = dist.get_rank()
        self.column, self.place = (int(each) for each in (table == self.rank).nonzero()[0])
        self.ranks = [int(each) for each in table[self.column]]
        self.num_columns, self.num_places = len(table), len(self.ranks)
        self.everyone = [int(each) for each in table.flatten()]
        self.is_first = self.rank == self.everyone[0]
        self.stage_group = dist.group.WORLD if mesh is None else mesh.get_group("stage")
        self.data_group = mesh.get_group("data") if mesh is not None and mesh.ndim == 2 else None
        self.timeout = timeout
        self.backend = backend_for(device)
        self.batches = self.backend != "gloo"
        """Whether the transfers of a tick begin together, in one order for everybody."""
        self.device = device if self.batches else torch.device("cpu")
        """Where what travels must be."""
        self._on_gpu = is_waited_for_by_device(self.device)
        self._begun: deque[list[tuple[Any, int | None]]] = deque([[]])  # by ticks
        shared = dist.distributed_c10d._get_default_store()
        prefix = f"redivider-{_attempt()}-{_num_teams}"
        self._store = dist.distributed_c10d.PrefixStore(prefix, shared)
        self.number = _num_teams
        _num_teams += 1
        groups: list[Any] = [dist.group.WORLD, self.stage_group, self.data_group]
        groups = list(dict.fromkeys(each for each in groups if each is not None))
        backends = [each._get_backend(self.device) for each in groups if self._on_gpu]
        abort = partial(_abort, backends)
        self.watch = Watch(self._store, self.rank, self.everyone, timeout, abort)
        if self.batches:
            with self.guarding():
                self._connect(groups)

    @property
    def is_last(self) -> bool:
        """Whether the loss is here."""
        return self.place == self.num_places - 1

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """End all processes if something goes wrong here, and hear of it if it does elsewhere."""
        self.watch.verify_well()
        try:
            yield
            self._verify_transfers()
            self.watch.verify_well()
        except Exception as error:
            if getattr(error, "is_agreed", False) or getattr(error, "is_told", False):
                raise  # everybody has it, and can go on; or an inner guard has seen to it
            heard = self._find_cause(error)
            if heard is None and not isinstance(error, PipelineError):
                notes = ", ".join(getattr(error, "__notes__", []))
                told = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
                self.watch.publish(f"{self.watch.name(self.rank)}: {told}")
            self.watch.fail()
            if heard is not None:
                heard.is_told = True
                raise heard from error
            error.is_told = True  # type: ignore[attr-defined]
            raise

    def _find_cause(self, error: Exception) -> PipelineError | None:
        """The failure of another process that an error may come of: numbers that make no sense."""
        self.watch.settle()
        if self.watch.heard is None and not isinstance(error, PipelineError):
            try:
                self._verify_transfers()
            except PipelineError as cause:
                return cause
        return self.watch.heard

    def _verify_transfers(self) -> None:
        """Raise if a transfer has failed: a GPU goes on with whatever is in its memory."""
        if self._on_gpu:
            for work, rank in (each for some in self._begun for each in some):
                if work.is_completed():
                    with self.talking(rank):
                        work.wait(timedelta(seconds=self.timeout))

    def name_stages(self, place: int, stages: str) -> None:
        """Say which stages the ranks at a place have, for errors."""
        for column in range(self.num_columns):
            self.watch.stages[self.everyone[column * self.num_places + place]] = stages

    def wait(self, work: Any, rank: int | None = None) -> None:
        """Wait for a transfer with a rank, or for something that all do; a GPU waits by itself."""
        with self.talking(rank):
            if self._on_gpu:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))

    def finish(self, work: Any, rank: int | None = None) -> None:
        """Wait on the host."""
        with self.talking(rank):
            if self._on_gpu:
                self._poll(work.is_completed)
            work.wait(timedelta(seconds=self.timeout))  # raises if it has failed
            self.watch.verify_well()  # a transfer that was aborted is complete, too

    def mark(self) -> Any:
        """An event that is over when the GPU has come here; nothing on a host."""
        if not self._on_gpu:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def follow(self, work: Any, rank: int | None, ready: Any) -> None:
        """Note something that the host does not wait for now: `catch_up` does, and the watch.

        `ready` marks where the GPU began it.
        """
        self._begun[-1].append((work, rank))
        if self._on_gpu:
            self.watch.follow(work, rank, ready)

    def catch_up(self, ticks: int = 0) -> None:
        """Wait on the host for all that was begun, but for that of the last few ticks.

        What has failed is known then: a GPU goes on with whatever is in its memory.
        """
        self._begun.append([])
        while len(self._begun) > ticks + 1:
            for work, rank in self._begun.popleft():
                self.finish(work, rank)

    def put_note(self, key: str, text: str) -> None:
        """Leave a text for another rank."""
        with self.talking(None):
            self._store.set(f"note {key}", text)

    def take_note(self, key: str, rank: int) -> str:
        """Take the text that a rank has left, or is going to leave."""
        key = f"note {key}"
        with self.talking(rank):
            self._poll(lambda: self._store.check([key]), longest=5e-3)
            text: str = self._store.get(key).decode()
            self._store.delete_key(key)
        return text

    def talking(self, rank: int | None) -> AbstractContextManager[None]:
        """Surround what another process may break by its end."""
        return self.watch.waiting(rank)

    def _poll(self, is_done: Callable[[], bool], longest: float = 2e-4) -> None:
        """Ask again and again, after pauses that grow up to some seconds."""
        deadline, pause = time.monotonic() + self.timeout, 5e-5
        while not is_done():
            self.watch.verify_well()
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _connect(self, groups: Sequence[Any]) -> None:
        """Set up communicators, all ranks together: the first transfer of a tick is of some."""
        for group in groups:
            flag = torch.zeros(1, device=self.device)
            with self.talking(None):
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
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            some = [each for each in tensors if each.dtype == dtype]
            flat = torch.cat([each.reshape(-1) for each in some]).to(self.device)
            work = dist.all_reduce(flat, group=self.data_group, async_op=True)
            self._settle(work, is_for_host=some[0].device.type == "cpu")
            flat.div_(self.num_columns)
            parts = torch.split(flat, [each.numel() for each in some])
            for each, part in zip(some, parts, strict=True):
                each.copy_(part.view_as(each))

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Give the first replica's tensors to the others."""
        if self.data_group is None or self.num_columns == 1:
            return
        source = self.everyone[self.place]
        for each in tensors:
            self._broadcast(each, source, self.data_group)

    def spread_in_column(self, tensor: Tensor, place: int) -> None:
        """Give a tensor of one rank to the others of its column."""
        self._broadcast(tensor, self.ranks[place], self.stage_group)

    def _broadcast(self, tensor: Tensor, source: int, group: Any) -> None:
        sent = tensor.detach().to(self.device).contiguous()
        if sent.numel():  # as bytes: backends do not know all dtypes
            data = sent.reshape(-1).view(torch.uint8)
            work = dist.broadcast(data, source, group=group, async_op=True)
            self._settle(work, source, is_for_host=tensor.device.type == "cpu")
        if self.rank != source:
            tensor.detach().copy_(sent)

    def gather(self, tensor: Tensor, *, in_column: bool = False) -> list[Tensor]:
        """Tensors of one shape of all ranks, or those of a column, in the order of the mesh.

        They are where the given one is.
        """
        group = self.stage_group if in_column else None
        sent = tensor.detach().to(self.device)
        numbers = dist.get_process_group_ranks(group)
        found = [torch.empty_like(sent) for _ in numbers]
        work = dist.all_gather(found, sent, group=group, async_op=True)
        self._settle(work, is_for_host=tensor.device.type == "cpu")
        order = self.ranks if in_column else self.everyone
        return [found[numbers.index(rank)].to(tensor.device) for rank in order]

    def _settle(self, work: Any, rank: int | None = None, *, is_for_host: bool = False) -> None:
        """Wait for what all do, on the host if its result is wanted there."""
        if is_for_host or not self._on_gpu:
            self.finish(work, rank)
        else:
            ready = self.mark()
            self.wait(work, rank)
            # Not the work itself: it would keep what was gathered or averaged alive.
            self.follow(Passed(self.mark()), rank, ready)

    def tell_all(self, text: str) -> list[str]:
        """Give a text to all ranks, and get everybody's, in the order of the mesh."""
        return self._tell(text, in_column=False)

    def tell_column(self, text: str) -> list[str]:
        """The same within a column."""
        return self._tell(text, in_column=True)

    def _tell(self, text: str, *, in_column: bool) -> list[str]:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else None
        size = torch.tensor([0 if data is None else len(data)])
        sizes = [int(each) for each in self.gather(size, in_column=in_column)]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        if data is not None:
            padded[: len(data)] = data
        found = self.gather(padded, in_column=in_column)
        pairs = zip(found, sizes, strict=True)
        return [bytes(each[:num].tolist()).decode() for each, num in pairs]

    def agree(self, number: float) -> float:
        """The largest of everybody's numbers."""
        return max(float(each) for each in self.gather(torch.tensor([number], dtype=torch.float64)))


def join(device: torch.device, timeout: float = 300.0) -> None:
    """Begin to talk to the other processes that torchrun has started, unless that is done."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every process takes memory of the first GPU, too
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise PipelineError(
            "a DistributedPipeline runs under torchrun (torchrun --nproc-per-node 4 train.py), or "
            "after torch.distributed.init_process_group; for one process use Pipeline"
        )
    # Its thread would end the process, or hold it up, before it can say which rank has failed.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    store, rank, num = next(rendezvous("env://"))
    # torchrun keeps one store for all attempts, with what an earlier one has left in it.
    store = dist.distributed_c10d.PrefixStore(_attempt(), store)
    own = _have_own_gpus(store, rank, num, device, timeout)
    dist.init_process_group(
        "nccl" if own else "gloo",
        store=store,
        rank=rank,
        world_size=num,
        timeout=timedelta(seconds=2 * timeout),
    )


def own_gpu() -> torch.device:
    """Return the GPU of this process: the one that was set, or else the one of its local rank."""
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", torch.cuda.current_device() or local)


def backend_for(device: torch.device) -> str:
    """Return the backend by which tensors of a device travel, in the group that holds all ranks."""
    config = dist.get_backend_config()
    backends = dict(each.split(":") for each in config.split(","))
    if device.type not in backends:
        raise ValueError(
            f"the stages are on {device}, and the process group has no backend for it ({config}); "
            "call init_process_group() without a backend"
        )
    return backends[device.type]


def _have_own_gpus(store: Any, rank: int, num: int, device: torch.device, timeout: float) -> bool:
    """Whether every process has a GPU for itself: NCCL refuses two processes on one."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu {rank}", mine)
    keys = [f"gpu {each}" for each in range(num)]
    store.wait(keys, timedelta(seconds=timeout))
    found = [store.get(key).decode() for key in keys]
    return all(found) and len(set(found)) == num


def is_waited_for_by_device(device: torch.device) -> bool:
    """Whether a wait for a transfer is queued on the device, and the host goes on."""
    return device.type == "cuda"


class Passed:
    """The end of something on a GPU, as a work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: timedelta) -> None:
        """The GPU has waited by itself."""


def _abort(backends: Sequence[Any]) -> None:
    """Abort communicators, so that nobody waits for a transfer that will not come."""
    if not backends:
        return
    with contextlib.suppress(RuntimeError):
        backends[0]._group_start()  # together: one by one they may wait for each other
    for each in backends:
        with contextlib.suppress(RuntimeError):
            each.abort()
    with contextlib.suppress(RuntimeError):
        backends[0]._group_end()


def _attempt() -> str:
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def is_last_rank() -> bool:
    """Whether this process speaks for all: the last one, or the only one."""
    if "RANK" not in os.environ:
        return True
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def leave() -> None:
    """End the talk with the others, if there is one."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
