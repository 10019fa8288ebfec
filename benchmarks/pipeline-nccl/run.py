"""Cost of a message over NCCL against a bare transfer, and host time of a tick.

Two ranks, on a GPU each where there are two. On one GPU they connect through sockets, as ranks of
two machines would: each has its own host identity.

    python benchmarks/pipeline-nccl/run.py
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import redivider as rd
from redivider.pipeline.runners.topology import Team
from redivider.pipeline.runners.wire import Incoming, Kind, Outgoing, Post
from redivider.pipeline.stages.compression import Packing

MIB = 2**20
SIZES = (MIB // 16, MIB, 64 * MIB)  # bytes of a message
NUM_TURNS = 7  # of bare and ours, one after the other
NUM_TRIPS = 40  # there and back, in a turn
NUM_TICKS = 200


def main() -> None:
    """Run both ranks and print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        mp.spawn(work, (str(store),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]


def work(rank: int, store: str) -> None:
    """Measure in one of the ranks; the first one prints."""
    alone = torch.cuda.device_count() < 2
    if alone:
        os.environ |= {
            "NCCL_HOSTID": f"{socket.gethostname()} {rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
        }
    device = torch.device("cuda", 0 if alone else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    team = Team(None, device, 60.0)

    def tell(*lines: str) -> None:
        if rank == 0:
            print(*lines, sep="\n", flush=True)

    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    version = ".".join(map(str, numbers))
    where = "on one GPU, through sockets" if alone else "on two GPUs"
    tell(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {version}, {where}", "")
    tell("| message | bare transfer | ours | ratio |", "|---|---|---|---|")
    for size in SIZES:
        bare, ours = trips(team, size)
        tell(f"| {size / MIB:g} MiB | {bare:.3f} ms | {ours:.3f} ms | {ours / bare:.2f} |")
    tell("", "| couplings in a stage | host time of a tick |", "|---|---|")
    for num in (1, 2, 4):
        tell(f"| {num} | {host_time(device, num):.2f} ms |")
    dist.destroy_process_group()


def trips(team: Team, size: int) -> tuple[float, float]:
    """Return milliseconds from a send to the use of the data, bare and ours, in turns."""
    bare, ours = Bare(team, size), Ours(team, size)
    for trip in (bare.trip, ours.trip):
        time_trips(trip)
    times = [(time_trips(bare.trip), time_trips(ours.trip)) for _ in range(NUM_TURNS)]
    return median(one for one, _ in times), median(other for _, other in times)


def time_trips(trip: Callable[[], None]) -> float:
    """Return the milliseconds of a trip in one direction."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_TRIPS):
        trip()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (2 * NUM_TRIPS) * 1e3


class Bare:
    """A tensor there and back, with torch's own functions."""

    def __init__(self, team: Team, size: int) -> None:
        self._rank, self._other = team.rank, 1 - team.rank
        self._sent, self._received = (torch.zeros(size // 4, device=team.device) for _ in range(2))

    def trip(self) -> None:
        if self._rank == 0:
            self._move(dist.isend, self._sent)
        self._move(dist.irecv, self._received)
        torch.add(self._received, 1, out=self._sent)  # the use
        if self._rank == 1:
            self._move(dist.isend, self._sent)

    def _move(self, operation: Any, tensor: Tensor) -> None:
        for transfer in dist.batch_isend_irecv([dist.P2POp(operation, tensor, self._other)]):
            transfer.wait()


class Ours:
    """Two streams there and back, as messages between stages."""

    def __init__(self, team: Team, size: int) -> None:
        self._team, self._post, packing = team, Post(team), Packing(None)
        other = 1 - team.rank
        kinds: tuple[Kind, Kind] = ("up", "down")
        number = size  # lines of their own
        self._out = Outgoing(self._post, team, packing, other, kinds[team.rank], 2, number)
        self._in = Incoming(self._post, team, packing, other, kinds[other], team.device, number)
        self._streams = tuple(torch.zeros(size // 8, device=team.device) for _ in range(2))

    def trip(self) -> None:
        if self._team.rank == 0:
            self._send()
        self._in.post_next()
        self._post.exchange()
        streams, _ = self._in.take()
        self._streams = tuple(stream + 1 for stream in streams)
        if self._team.rank == 1:
            self._send()

    def _send(self) -> None:
        self._out.send(self._streams, None)
        self._post.exchange()
        self._team.catch_up(3)


def host_time(device: torch.device, num: int) -> float:
    """Return the host's milliseconds for a tick of a stage; the GPU is almost idle."""
    couplings = [rd.Coupling(nn.Linear(16, 16)) for _ in range(2 * num)]
    model = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse("mean")]).to(device)
    pipe = rd.DistributedPipeline(
        model,
        stages=[num + 1, num + 1],
        loss=F.mse_loss,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.01, momentum=0.9),
        capture=False,
    )
    x = torch.randn(8, 16, device=device)
    for _ in range(20):
        pipe.step(x, x)
    times = []
    for _ in range(NUM_TICKS):
        start = time.thread_time()  # of this thread, including its polls of transfers
        pipe.step(x, x)
        times.append(time.thread_time() - start)
    pipe.flush()
    pipe.close()
    return median(times) * 1e3


if __name__ == "__main__":
    main()
