"""Device, threads and memory of the machine that a run uses."""

import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from redivider.backward.auto import is_short_of_memory
from redivider.errors import PipelineError
from redivider.train.errors import TrainError
from redivider.train.recipe import Recipe


@contextmanager
def using_threads(num: int) -> Iterator[None]:
    """Use `num` CPU threads; 0 leaves their number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(num or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def report_out_of_memory(recipe: Recipe, device: str | torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into one line: where it happened, and what takes less memory."""
    try:
        yield
    except PipelineError:  # it quotes another process, whose error may be out of memory
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_short_of_memory(error):
            raise
        request = re.search(r"allocate ([\d.]+) (\w+)", str(error))
        amount = f" for {_format_bytes(*request.groups())}" if request else ""
        where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        less = "a run with a smaller --microbatch and a larger --accumulate, or of a smaller model,"
        if recipe.method == "store" and recipe.model.startswith("rev"):
            less = f"--method reverse keeps less; {less}"
        raise TrainError(
            f"no memory is left on {device}{amount}{where}; {less} takes less"
        ) from error


def _format_bytes(number: str, unit: str) -> str:
    """Format an amount of memory; torch's CPU allocator reports bytes, its GPU allocator MiB."""
    return f"{float(number) / 2**20:,.0f} MiB" if unit == "bytes" else f"{number} {unit}"


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; raise if this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
    except RuntimeError:
        raise TrainError(f"there is no device {name!r}; choose auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        num = torch.cuda.device_count()
        raise TrainError(f"{name} is not available: found {num} GPUs; use --device cpu")
    return device


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def machine_name() -> str:
    """Return the system, the kind of processor and the number of cores of this machine."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
