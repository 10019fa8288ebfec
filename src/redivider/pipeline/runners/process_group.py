"""Join and leave the process group, and choose its GPU and its backend."""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from redivider._torch_private import nccl_group, prefix_store
from redivider.errors import PipelineError
from redivider.pipeline.runners.torchrun import attempt


def join(device: torch.device, timeout: float = 300.0) -> None:
    """Initialize the process group that torchrun has set up, unless the caller has done so."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every process creates a context on the first GPU
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise PipelineError(
            "a DistributedPipeline runs under torchrun (torchrun --nproc-per-node 4 train.py), or "
            "after torch.distributed.init_process_group; for one process use Pipeline"
        )
    # torch's own watchdog would kill or block the process before it can report the failed rank.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    store, rank, num = next(rendezvous("env://"))
    # torchrun keeps one store for all attempts: ignore keys that an earlier attempt has left.
    store = prefix_store(attempt(), store)
    is_unshared = have_own_gpus(store, rank, num, device, timeout)
    dist.init_process_group(
        "nccl" if is_unshared else "gloo",
        store=store,
        rank=rank,
        world_size=num,
        timeout=timedelta(seconds=2 * timeout),
    )


def own_gpu() -> torch.device:
    """Return the GPU of this process: the current one if not the first, else by local rank."""
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", torch.cuda.current_device() or local)


def backend_for(device: torch.device) -> str:
    """Return the backend that the default process group uses for tensors of a device."""
    config = dist.get_backend_config()
    backends = dict(pair.split(":") for pair in config.split(","))
    if device.type not in backends:
        raise ValueError(
            f"the stages are on {device}, and the process group has no backend for it ({config}); "
            "call init_process_group() without a backend"
        )
    return backends[device.type]


def have_own_gpus(store: Any, rank: int, num: int, device: torch.device, timeout: float) -> bool:
    """Return whether no two processes share a GPU, which NCCL refuses.

    Compare UUIDs, not indices: a process that sees one GPU alone calls it cuda:0.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu {rank}", uuid)
    keys = [f"gpu {other}" for other in range(num)]
    store.wait(keys, timedelta(seconds=timeout))
    uuids = [store.get(key).decode() for key in keys]
    return all(uuids) and len(set(uuids)) == num


class Communicators:
    """NCCL communicators of a process; none with gloo."""

    def __init__(self, backends: Sequence[Any] = (), device: torch.device | None = None) -> None:
        self._backends, self._device = backends, device

    def prepare_thread(self) -> None:
        """Make the device current in a thread that may abort, while CUDA calls do not block."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def have_failed(self) -> bool:
        """Return whether NCCL has noticed that a peer is gone. Make no CUDA call."""
        try:
            return any(backend.get_error().name != "SUCCESS" for backend in self._backends)
        except RuntimeError:
            return False  # a backend that cannot tell

    def abort(self, grace: float, reason: str) -> None:
        """Release a host or a GPU that waits for a lost transfer.

        If that takes longer than `grace` seconds, print why and where, and exit the process.
        """
        if not self._backends:
            return
        timer = threading.Timer(grace / 2, sys.stderr.write, [f"aborting NCCL, since {reason}\n"])
        timer.daemon = True
        timer.start()
        self.exit_later(grace)
        try:
            with nccl_group(self._backends[0]):  # separate aborts may deadlock
                for backend in self._backends:
                    with contextlib.suppress(RuntimeError):
                        backend.abort()
        finally:
            timer.cancel()
            self.cancel_exit()

    def exit_later(self, seconds: float) -> None:
        """Start the exit timer anew: after some time print where Python is, and exit the process.

        It needs no interpreter lock, which a thread that hangs in a CUDA call may hold.
        """
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def cancel_exit(self) -> None:
        """Cancel the exit timer."""
        faulthandler.cancel_dump_traceback_later()


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
