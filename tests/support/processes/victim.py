"""`redivider` in a process to which something happens at a tick of the first attempt.

VICTIM=rank:tick is killed there, STOP=rank:tick has torchrun stop all of them, FULL=rank:tick has
no memory left. With BACKEND=nccl ranks talk by NCCL, though they share a GPU.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import redivider as rd
from redivider.cli import main
from redivider.pipeline.runners import process_group
from support.processes.launch import nccl_env

step = rd.DistributedPipeline.step


def meet(name: str) -> int | None:
    """The tick at which this process meets its fate, if it does."""
    rank, _, tick = os.environ.get(name, "").partition(":")
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return int(tick) if os.environ["RANK"] == rank and is_first else None


def step_or_die(self, *given, **side):
    tick = self.in_flight.next
    if tick == meet("VICTIM"):
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if tick == meet("STOP"):
        os.kill(os.getppid(), signal.SIGTERM)
    if tick == meet("FULL"):
        torch.nn.BatchNorm2d.forward = lambda *given: torch.empty(2**60, dtype=torch.uint8)
    return step(self, *given, **side)


if os.environ.get("BACKEND") == "nccl":
    os.environ |= nccl_env(int(os.environ["RANK"]))
    process_group.have_own_gpus = lambda *given: True
    torch.backends.cudnn.deterministic = True  # runs are compared to the last bit
rd.DistributedPipeline.step = step_or_die  # this module is imported by such processes alone

if __name__ == "__main__":
    sys.exit(main())
