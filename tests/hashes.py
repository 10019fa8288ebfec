"""Print hashes of the losses and weights of twenty trainings, which no refactoring may change.

    python tests/hashes.py > before.txt    # then change the code
    python tests/hashes.py | diff before.txt -

Hashes hold for one machine, one torch and one thread, so none are stored. Only public names are
used, so that the script runs on any commit.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import redivider as rd

METHODS = ("petra", "dsp", "delayed", "delayed-graph", "exact-inverse", "approximate-input")


def f(width: int, dropout: float = 0.1) -> nn.Module:
    """Return the residual function of a coupling."""
    layers = (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(width, width))


def network(**options: Any) -> rd.Chain:
    """Return two rows of couplings with a junction between them, dropout and batch norm."""
    torch.manual_seed(0)
    units = [
        nn.Linear(5, 8),
        rd.Duplicate(),
        *(rd.Coupling(f(8)) for _ in range(3)),
        rd.Fuse("concat"),
        nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12)),
        rd.Split(),
        *(rd.Coupling(f(6)) for _ in range(2)),
        rd.Fuse("mean"),
        nn.Linear(6, 3),
    ]
    return rd.Chain(units, **options)


def batches(number: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield random micro-batches."""
    dice = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield torch.randn(8, 5, generator=dice), torch.randint(3, (8,), generator=dice)


def digest(tensors: Iterable[Tensor]) -> str:
    """Hash the bytes of all tensors."""
    result = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        result.update(data.numpy().tobytes())
    return result.hexdigest()[:16]


def train_chain(autocast: bool = False, **options: Any) -> str:
    """Train a chain by ten steps of SGD."""
    model = network(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, target in batches(10):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return digest([*losses, *model.state_dict().values()])


def optimizer_of(stage: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of one stage."""
    return torch.optim.SGD(stage.parameters(), lr=0.02, momentum=0.9)


def run(pipe: Any, number: int = 24) -> str:
    """Run ticks, an evaluation, and a flush with an update."""
    ticks = [pipe.step(x, target) for x, target in batches(number)]
    output = pipe.evaluate(next(iter(batches(1)))[0])
    ticks += pipe.flush(update=True)
    losses = [tick.loss for tick in ticks if tick.loss is not None]
    return digest([*losses, output, *pipe.full_state_dict().values()])


def train_pipeline(**options: Any) -> str:
    """Train a pipeline in one process."""
    return run(build(**options))


def build(**options: Any) -> rd.Pipeline:
    """Return a pipeline in one process."""
    defaults = {"stages": 4, "loss": F.cross_entropy, "optimizer": optimizer_of, "seed": 3}
    return rd.Pipeline(network(), **{**defaults, **options})


def resume(**options: Any) -> str:
    """Save in the middle, and resume in another pipeline."""
    pipe = build(**options)
    for x, target in batches(11):
        pipe.step(x, target)
    with tempfile.TemporaryDirectory() as folder:
        pipe.save(Path(folder) / "state")
        other = build(**options)
        other.load(Path(folder) / "state")
    return run(other, 9)


def work(rank: int, folder: str, options: dict[str, Any]) -> None:
    """Train on one rank over gloo; the last rank writes the hash."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    options = {"loss": F.cross_entropy, "optimizer": optimizer_of, "seed": 3, **options}
    result = run(rd.DistributedPipeline(network(), **options))
    if rank == 1:
        (Path(folder) / "hash").write_text(result)
    dist.destroy_process_group()


def train_distributed(**options: Any) -> str:
    """Train a pipeline in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, options), nprocs=2)
        return (Path(folder) / "hash").read_text()


SETTINGS: dict[str, Callable[[], str]] = {
    **{
        f"chain {backward}": partial(train_chain, backward=backward)
        for backward in ("store", "checkpoint", "reverse", "reverse-checkpoint")
    },
    "chain reverse fixed": lambda: train_chain(backward="reverse", arithmetic="fixed"),
    "chain reverse autocast": lambda: train_chain(True, backward="reverse"),
    "chain reverse fixed autocast": lambda: train_chain(
        True, backward="reverse", arithmetic="fixed"
    ),
    **{f"pipeline {m}": partial(train_pipeline, method=m, accumulate=2) for m in METHODS},
    "pipeline fixed, latency 2": lambda: train_pipeline(arithmetic="fixed", latency=2),
    "pipeline look-ahead": lambda: train_pipeline(lookahead=True, lr_by_delay=True),
    "pipeline clipped over all": lambda: train_pipeline(clip_norm=0.5, clip_over="all"),
    "pipeline int8 messages": lambda: train_pipeline(message_dtype=torch.int8, stages="auto"),
    "pipeline resumed": lambda: resume(accumulate=3),
    "processes": lambda: train_distributed(accumulate=2),
    "processes, latency 2, bf16 messages": lambda: train_distributed(
        stages=5, latency=2, message_dtype=torch.bfloat16
    ),
}


def main() -> None:
    """Print a line for each setting."""
    torch.set_num_threads(1)
    for name, train in SETTINGS.items():
        print(f"{train()}  {name}", flush=True)
    print(f"{len(SETTINGS)} settings", file=sys.stderr)


if __name__ == "__main__":
    main()
