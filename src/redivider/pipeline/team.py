"""The processes of a pipeline: a column of ranks for each replica, the stages of one in a column.

            stage 0  1  2  3
    data 0  rank  0  1  2  3     messages travel along a row,
    data 1  rank  4  5  6  7     gradients are averaged down a column of this table

Whoever waits for another waits for `timeout` seconds at most, and then says for whom.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from redivider.errors import PipelineError
from redivider.pipeline.watch import Watch

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
        join(device)
        if mesh is None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("stage",))
        table = mesh.mesh if mesh.ndim == 2 else mesh.mesh[None]
        if mesh.ndim > 2 or mesh.mesh_dim_names not in (("data", "stage"), ("stage",)):
            raise ValueError(
                'the mesh must have the dimensions ("data", "stage") or ("stage",), got '
                f"{mesh.mesh_dim_names} of {tuple(mesh.mesh.shape)}"
            )
        self.rank = dist.get_rank()
        if sorted(table.flatten().tolist()) != list(range(dist.get_world_size())):
            raise ValueError(
                f"the mesh must hold every rank once, got {table.tolist()} of "
                f"{dist.get_world_size()} ranks"
            )
        self.column, self.place = (int(each) for each in (table == self.rank).nonzero()[0])
        self.ranks = [int(each) for each in table[self.column]]
        self.num_columns, self.num_places = table.shape
        self.everyone = [int(each) for each in table.flatten()]
        self.is_first = self.rank == self.everyone[0]
        self.stage_group = mesh.get_group("stage")
        self.data_group = mesh.get_group("data") if mesh.ndim == 2 else None
        self.timeout = timeout
        backend = dist.get_backend(self.stage_group)
        self.batches = backend == "nccl"
        """Whether the transfers of a tick begin together, in one order for everybody."""
        self.device = device if self.batches else torch.device("cpu")
        """Where what travels must be."""
        shared = dist.distributed_c10d._get_default_store()
        prefix = f"redivider-{_attempt()}-{_num_teams}"
        store = dist.distributed_c10d.PrefixStore(prefix, shared)
        self.number = _num_teams
        _num_teams += 1
        self.watch = Watch(store, self.rank, self.everyone, timeout)

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
        except Exception as error:
            if getattr(error, "is_agreed", False):
                raise  # everybody has it, and can go on
            if not isinstance(error, PipelineError):
                notes = ", ".join(getattr(error, "__notes__", []))
                told = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
                self.watch.publish(f"{self.watch.name(self.rank)}: {told}")
            self.watch.close()
            raise

    def name_stages(self, place: int, stages: str) -> None:
        """Say which stages the ranks at a place have, for errors."""
        for column in range(self.num_columns):
            self.watch.stages[self.everyone[column * self.num_places + place]] = stages

    def wait(self, work: Any, rank: int | None = None) -> None:
        """Wait for a transfer with a rank, or for something that all do."""
        with self.talking(rank):
            work.wait(timedelta(seconds=self.timeout))

    @contextmanager
    def talking(self, rank: int | None) -> Iterator[None]:
        """Surround what another process may break by its end."""
        with self.watch.waiting(rank):
            try:
                yield
            except (RuntimeError, ValueError) as error:
                raise self.watch.find_reason(rank, str(error)) from error

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the replicas of a stage, in place."""
        if self.data_group is None or self.num_columns == 1 or not tensors:
            return
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            some = [each for each in tensors if each.dtype == dtype]
            flat = torch.cat([each.reshape(-1) for each in some]).to(self.device)
            self.wait(dist.all_reduce(flat, group=self.data_group, async_op=True))
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
            self.wait(dist.broadcast(data, source, group=group, async_op=True), source)
        if self.rank != source:
            tensor.detach().copy_(sent)

    def gather(self, tensor: Tensor, *, in_column: bool = False) -> list[Tensor]:
        """Tensors of one shape of all ranks, or those of a column, in the order of the mesh."""
        group = self.stage_group if in_column else None
        sent = tensor.detach().to(self.device)
        numbers = dist.get_process_group_ranks(group)
        found = [torch.empty_like(sent) for _ in numbers]
        self.wait(dist.all_gather(found, sent, group=group, async_op=True))
        order = self.ranks if in_column else self.everyone
        return [found[numbers.index(rank)] for rank in order]

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


def join(device: torch.device) -> None:
    """Begin to talk to the other processes that torchrun has started, unless that is done."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise PipelineError(
            "a DistributedPipeline runs under torchrun (torchrun --nproc-per-node 4 train.py), or "
            "after torch.distributed.init_process_group; for one process use Pipeline"
        )
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL refuses two processes on one GPU.
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= num_here
    store, rank, num = next(rendezvous("env://"))
    # torchrun keeps one store for all attempts, with what an earlier one has left in it.
    store = dist.distributed_c10d.PrefixStore(_attempt(), store)
    backend = "nccl" if own_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num)


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
