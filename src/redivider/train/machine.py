"""The machine that a run is on."""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from redivider.auto import is_short_of_memory
from redivider.errors import PipelineError
from redivider.train.errors import TrainError
from redivider.train.recipe import Recipe


@contextmanager
def using_threads(num: int) -> Iterator[None]:
    """Run by so many threads of the CPU; 0 is as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def within_memory(recipe: Recipe, device: str | torch.device) -> Iterator[None]:
    """Say in a line that memory is full, where, and what takes less."""
    try:
        yield
    except PipelineError:  # which quotes what another process has said
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_short_of_memory(error):
            raise
        asked = re.search(r"allocate ([\d.]+) (\w+)", str(error))
        much = f" for {_amount(*asked.groups())}" if asked else ""
        where = "".join(f", {each}" for each in getattr(error, "__notes__", ()))
        less = "a run with a smaller --microbatch and a larger --accumulate, or of a smaller model,"
        if recipe.method == "store" and recipe.model.startswith("rev"):
            less = f"--method reverse keeps less; {less}"
        raise TrainError(
            f"no memory is left on {device}{much}{where}; {less} takes less"
        ) from error


def _amount(number: str, unit: str) -> str:
    """As people say it: torch's allocator of the CPU has bytes."""
    return f"{float(number) / 2**20:,.0f} MiB" if unit == "bytes" else f"{number} {unit}"


def resolve_device(name: str) -> torch.device:
    """A device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
    except RuntimeError:
        raise TrainError(f"there is no device {name!r}; take auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        num = torch.cuda.device_count()
        raise TrainError(f"{name} was asked for, and {num or 'no'} GPU is there; take --device cpu")
    return device


def device_name(device: torch.device) -> str:
    """What a person calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
