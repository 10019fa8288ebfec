"""Search for the largest batch whose training step fits into memory.

Sizes are tried in a process of their own, so that the caller's model, random numbers and memory
stay as they are. The answer is confirmed in a fresh process, because the memory of one that has
tried many sizes is fragmented.
"""

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
from torch import nn

from redivider.backward.auto import is_short_of_memory
from redivider.checks.memory import Live
from redivider.tree import map_tensors, tensors_of

PRECISION = 64  # the answer is exact to one part in this
MOST = 2**20  # batches are not larger
NUM_STEPS = 2  # of a trial: the second finds the gradients, and an optimizer's state, of the first


def find_max_batch(
    model: nn.Module | Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    *,
    step: Callable[[nn.Module, Any], Any] | None = None,
    memory: int | None = None,
    headroom: float = 0.05,
) -> int:
    """Return the largest batch whose training step fits into memory, or 0 if none does.

        def make_batch(size):
            return {"input_ids": (tokens := torch.randint(50257, (size, 1024))), "labels": tokens}

        size = rd.find_max_batch(model, make_batch)

    The search runs in other processes, to which the functions are pickled: define them in a module,
    and call this under `if __name__ == "__main__":`. Meanwhile a model on a GPU is moved to the
    CPU. What else is on the GPU, such as the state of an optimizer, takes its share.

    Args:
        model: The network, on the device where it trains; or a function that makes it there.
        make_batch: A function from a size to a batch: a tensor, a tuple of arguments or a dict of
            keywords. Tensors are moved to the model's device.
        step: A function that trains a model on a batch once. By default forward and backward, of
            the output's `loss` if it has one, else of the sum of all outputs.
        memory: Bytes to stay within; all that a GPU has left by default. Needed on the CPU.
        headroom: Share of that memory to leave.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be a share from 0 to 1, got {headroom!r}")
    if memory is not None and memory <= 0:
        raise ValueError(f"memory must be a number of bytes, got {memory!r}")
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = torch.device("cpu") if parameter is None else parameter.device
    with TemporaryDirectory() as folder, _on_the_cpu(model, device):
        job = Path(folder) / "job"
        try:
            torch.save((model, make_batch, step or train_once, device), job)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ValueError(
                "find_max_batch runs in other processes, and this cannot be pickled; define model, "
                f"make_batch and step in a module, not inside of a function: {error}"
            ) from None
        size = _in_process(_search, job, memory, headroom)
        while size and not _in_process(_confirm, job, memory, headroom, size):
            size -= max(1, size // 16)
    return size


def train_once(model: nn.Module, batch: Any) -> None:
    """Run forward and backward."""
    args = batch if isinstance(batch, tuple) else (batch,)
    output = model(**batch) if isinstance(batch, dict) else model(*args)
    loss = getattr(output, "loss", None)
    if loss is None:
        parts = [tensor.float().sum() for tensor in tensors_of(output) if tensor.requires_grad]
        if not parts:
            raise ValueError("no output of the model has a gradient; is all of it frozen?")
        loss = torch.stack(parts).sum()
    loss.backward()


class _Limited(Live):  # type: ignore[no-untyped-call]
    """Counter of live bytes, which raises beyond a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def _remember(self, storage: torch.UntypedStorage, size: int) -> None:
        super()._remember(storage, size)
        if self.bytes > self._limit:
            raise MemoryError(f"{self.bytes} bytes, more than {self._limit:.0f}")


class _Trials:
    """Trials of a training step, in a process of their own."""

    def __init__(self, job: Path, memory: int | None, headroom: float) -> None:
        model, self._make_batch, self._step, device = torch.load(job, weights_only=False)
        self._model = model.to(device) if isinstance(model, nn.Module) else model()
        self._device = next((param.device for param in self._model.parameters()), device)
        self.limit: float
        """Bytes to stay within."""
        self.peaks: dict[int, float] = {}
        """Peaks in bytes, by the sizes that fit."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            taken = torch.cuda.memory_reserved(self._device)  # by the weights, which count
            self.limit = (1 - headroom) * min(free + taken, memory or total)
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total), self._device)
        elif memory is None:
            raise ValueError("on the CPU, say how much memory there is: memory=8 * 2**30")
        else:
            weights = [*self._model.parameters(), *self._model.buffers()]
            self.limit = (1 - headroom) * memory - sum(weight.nbytes for weight in weights)

    def fits(self, size: int) -> bool:
        """Return whether training steps of a size fit."""
        try:
            is_cuda = self._device.type == "cuda"
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            counter = nullcontext() if is_cuda else _Limited(self.limit)
            with counter as live, torch.enable_grad():
                for _ in range(NUM_STEPS):
                    batch = map_tensors(lambda t: t.to(self._device), self._make_batch(size))
                    self._step(self._model, batch)
                    del batch
            if is_cuda:
                torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device) if live is None else live.peak
            self.peaks[size] = peak
            return True
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_short_of_memory(error):
                raise
            return False
        finally:
            self._model.zero_grad()
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


def guess_size(peaks: dict[int, float], limit: float, good: int, bad: int) -> int:
    """Return a size to try next, between one that fits and one that does not.

    Peaks grow by about the same for every sample. Those of small sizes may have another cause, so
    that a guess is not larger than eight times what fits.

    Args:
        peaks: Peaks in bytes, by the sizes that fit.
        limit: Bytes to stay within.
        good: Largest size that fits.
        bad: Smallest size that does not.
    """
    (a, first), (b, second) = [(0, 0.0), *sorted(peaks.items())][-2:]
    per_sample = max((second - first) / (b - a), limit / MOST)
    size = int(b + (limit - second) / per_sample)
    if size >= bad:  # peaks are not all that a device needs
        size = bad - max(1, (bad - good) // 4)
    return max(good + 1, min(size, 8 * good))


def _search(trials: _Trials) -> int:
    """Guess sizes by the peaks of those that fit, until the answer is precise."""
    try:
        good, bad = (1, MOST + 1) if trials.fits(1) else (0, 1)
    except ValueError:  # batch norms need two samples
        good, bad = (2, MOST + 1) if trials.fits(2) else (0, 1)
    if good and not trials.fits(2 * good):
        bad = 2 * good
    elif good:
        good = 2 * good
    while bad - good > max(1, good // PRECISION):
        size = guess_size(trials.peaks, trials.limit, good, bad)
        good, bad = (size, bad) if trials.fits(size) else (good, size)
    return good


def _confirm(trials: _Trials, size: int) -> int:
    return int(trials.fits(size))


def _in_process(run: Callable[..., int], job: Path, *args: Any) -> int:
    """Return the result of a function of trials, from a fresh process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, run, job, *args))
    process.start()
    theirs.close()
    try:
        kind, result = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a trial process ended with exit code {process.exitcode} before it had a result; call "
            'find_max_batch under if __name__ == "__main__": and see what it printed'
        ) from None
    except BaseException:  # as by Ctrl-C
        process.kill()
        raise
    finally:
        ours.close()
        process.join()
    if kind != "size":
        raise {"ValueError": ValueError}.get(kind, RuntimeError)(result)
    return int(result)


def _child(pipe: Any, run: Callable[..., int], job: Path, *args: Any) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    memory, headroom, *rest = args
    result: tuple[str, Any]
    try:
        result = "size", run(_Trials(job, memory, headroom), *rest)
    except ValueError as error:
        result = "ValueError", str(error)
    except Exception as error:
        result = "RuntimeError", f"the training step failed: {type(error).__name__}: {error}"
    pipe.send(result)


def _end_with_parent() -> None:
    """End this process if the caller's ends: it would hold the GPU for nobody."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _on_the_cpu(model: Any, device: torch.device) -> Iterator[None]:
    """Move a model to the CPU for a while, so that its memory is free for the trials."""
    if device.type == "cpu":
        yield
        return
    model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)
