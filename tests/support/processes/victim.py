"""`redivider` in a process that fails at a tick.

VICTIM=rank:tick is killed there, STOP=rank:tick has torchrun stop all ranks, FULL=rank:tick runs
out of memory: in the first attempt, or in that of STOP=rank:tick:attempt. With BACKEND=nccl ranks
use NCCL, though they share a GPU.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import redivider as rd
from redivider.cli import main as main
from redivider.pipeline.runners import process_group
from support.processes.launch import nccl_env

step = rd.DistributedPipeline.step


def meet(name: str) -> int | None:
    """Return the tick at which this process fails in this way, if it does."""
    rank, _, when = os.environ.get(name, "").partition(":")
    tick, _, attempt = when.partition(":")
    is_now = os.environ["TORCHELASTIC_RESTART_COUNT"] == (attempt or "0")
    return int(tick) if os.environ["RANK"] == rank and is_now else None


def step_or_die(self, *args, **side):
    tick = self.in_flight.next
    if tick == meet("VICTIM"):
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if tick == meet("STOP"):
        os.kill(os.getppid(), signal.SIGTERM)
    if tick == meet("FULL"):
        torch.nn.LayerNorm.forward = lambda *_: torch.empty(  # type: ignore[method-assign]
            2**60, dtype=torch.uint8
        )
    return step(self, *args, **side)


if os.environ.get("BACKEND") == "nccl":
    os.environ |= nccl_env(int(os.environ["RANK"]))
    process_group.have_own_gpus = lambda *_: True
    torch.backends.cudnn.deterministic = True  # runs are compared to the last bit
# Only such processes import this module.
rd.DistributedPipeline.step = step_or_die  # type: ignore[assignment,method-assign]

if __name__ == "__main__":
    sys.exit(main())
