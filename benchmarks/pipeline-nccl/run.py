"""Cost of a message over NCCL against a bare transfer, and host time of a tick.

Two ranks, on a GPU each where there are two. On one GPU they connect through sockets, as ranks of
two machines would: each has its own host identity.

    python benchmarks/pipeline-nccl/run.py
"""

import cProfile
import os
import pstats
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

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
# A tick, which returns whether it was captured, and its pipeline.
Made: TypeAlias = tuple[Callable[[], bool], rd.DistributedPipeline]


def main() -> None:
    """Run both ranks and print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        mp.spawn(work, (str(store),), nprocs=2)  # type: ignore[no-untyped-call]


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
    tell("", "| stage | eager | awake | captured | awake |", "|---|---|---|---|---|")
    for num in (1, 2, 4):
        tell_times(tell, f"couplings: {num}", team, partial(couplings, team, num))
    tell_times(tell, "half of RevNet-18", team, partial(revnet18, team))
    dist.destroy_process_group()


def tell_times(
    tell: Callable[..., None], name: str, team: Team, make: Callable[[bool], Made]
) -> None:
    """Print the host times of eager and of captured ticks."""
    times = [ms for is_captured in (False, True) for ms in host_time(team, make(is_captured))]
    tell(f"| {name} | " + " | ".join(f"{ms:.2f} ms" for ms in times) + " |")


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


def sgd(stage: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer at whose rate nothing diverges: the data is noise."""
    return torch.optim.SGD(stage.parameters(), lr=1e-5, momentum=0.9)


def couplings(team: Team, num: int, capture: bool) -> Made:
    """Return a tick of two stages of some couplings; the GPU is almost idle."""
    units = [rd.Coupling(nn.Linear(16, 16)) for _ in range(2 * num)]
    model = rd.Chain([rd.Duplicate(), *units, rd.Fuse("mean")]).to(team.device)
    cut = [num + 1, num + 1]
    pipe = rd.DistributedPipeline(
        model, stages=cut, loss=F.mse_loss, optimizer=sgd, capture=capture
    )
    x = torch.randn(8, 16, device=team.device)

    def step() -> bool:
        pipe.step(x, x)
        return pipe.execution.is_active

    return step, pipe


def revnet18(team: Team, capture: bool) -> Made:
    """Return a tick of RevNet-18 in two stages, with micro-batches of 16 images."""
    model = rd.create_model("revnet18", num_classes=10, image_size=32).to(team.device)
    pipe = rd.DistributedPipeline(
        model, stages=2, loss=F.cross_entropy, optimizer=sgd, capture=capture
    )
    x = torch.randn(16, 3, 32, 32, device=team.device)
    target = torch.randint(10, (16,), device=team.device)

    def step() -> bool:
        with torch.autocast("cuda", torch.bfloat16):
            pipe.step(x, target)
        return pipe.execution.is_active

    return step, pipe


def host_time(team: Team, made: Made) -> tuple[float, float]:
    """Return the milliseconds that the host works for a tick, of the slower rank.

    First as it is: the host sleeps while it waits for the GPU, and its core is slow when it wakes.
    Then awake and without waiting: as fast as ticks could follow each other.
    """
    step, pipe = made
    is_captured = [step() for _ in range(20)][-1]
    waited = 0.0

    def spin(is_done: Callable[[], bool], longest: float = 0.0) -> None:
        nonlocal waited
        start = time.thread_time()
        while not is_done():
            pipe.team.watch.raise_failure()
        waited += time.thread_time() - start

    medians = []
    for is_awake in (False, True):
        if is_awake:
            pipe.team._poll = spin  # type: ignore[method-assign]
        times = []
        for _ in range(NUM_TICKS):
            start, waited = time.thread_time(), 0.0
            step()
            times.append(time.thread_time() - start - waited)
        medians.append(team.max_over_ranks(median(times) * 1e3))
    if is_captured and os.environ.get("PROFILE"):
        profile(step, prints=team.rank == int(os.environ["PROFILE"]))
    return medians[0], medians[1]


def profile(step: Callable[[], bool], *, prints: bool) -> None:
    """Print where the host of one rank spends its time."""
    with cProfile.Profile() as profiler:
        for _ in range(NUM_TICKS):
            step()
    if prints:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
