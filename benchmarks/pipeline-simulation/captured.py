"""Predicted against measured throughput of captured ticks on a GPU.

    python benchmarks/pipeline-simulation/captured.py --out results.json

All stages of a pipeline run on one GPU, which is one device to the simulator: it gets the sums of
the times that `rd.measure_stages` takes of the stages. Branches of a captured tick run beside each
other, and share the GPU; without branches its kernels follow each other, as in the simulator.
"""

import argparse
import gc
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import redivider as rd
from redivider.pipeline.runners.captured import CapturedRunner
from redivider.pipeline.runners.cuda_graphs import CudaGraphs

NUM_TICKS = 16  # of a round, in a multiple of the micro-batches of an update
ACCUMULATE = 8


class OneBranch(CudaGraphs):
    """CUDA graphs without branches."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        super().__init__(device, 0)

    def lane(self, index: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, lane: int, other: int) -> None:
        pass


@dataclass(frozen=True)
class Row:
    """One setting of the table."""

    model: str
    batch: int
    image_size: int
    stages: int
    latency: float
    branches: bool

    def __str__(self) -> str:
        name = f"{self.model}, batch {self.batch}, {self.stages} stages, latency {self.latency:g}"
        return name + (", branches" if self.branches else "")


ROWS = [
    Row(model, batch, size, stages, latency, branches)
    for model, batch, size, stages in (
        ("rev_vit_base", 32, 224, 8),
        ("revnet50", 32, 128, 18),
        ("rev_vit_small", 128, 32, 26),
    )
    for latency, branches in ((1, False), (1, True), (0.5, True))
]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in float32."""
    return F.cross_entropy(output.float(), target)


def compare(row: Row, rounds: int) -> dict[str, Any]:
    """Return measured and predicted throughput of a setting, medians over the rounds."""
    options: dict[str, Any] = {"patch_size": 4} if row.image_size == 32 else {}
    size = row.image_size
    chain = rd.create_model(row.model, num_classes=10, image_size=size, device="cuda", **options)
    if "net" in row.model:
        chain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(row.batch, 3, size, size, device="cuda")
    target = torch.randint(10, (row.batch,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        costs = rd.measure_stages(chain, row.stages, x, repeats=20)
        pipe = rd.Pipeline(
            chain,
            stages=costs.cut,
            loss=loss_of,
            optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=1e-6, fused=True),
            accumulate=ACCUMULATE,
            latency=row.latency,
            capture=True,
        )
        if not row.branches:
            pipe.execution = CapturedRunner(pipe, partial(OneBranch, torch.device("cuda")))
        for _ in range(4 * row.stages + 4 * ACCUMULATE):
            pipe.step(x, target)
        if not pipe.execution.is_active:
            raise SystemExit(f"ticks of {row} were not captured; the log says why")
        measured = [_time(pipe, x, target) for _ in range(rounds)]
    forward, backward = sum(costs.forward), sum(costs.backward)
    predicted = rd.simulate(stages=1, forward=forward, backward=backward).throughput
    error = predicted / median(measured) - 1
    return asdict(row) | {
        "predicted": predicted,
        "measured": median(measured),
        "error": error,
        "rounds": measured,
        "costs": asdict(costs),
    }


def _time(pipe: rd.Pipeline, x: Tensor, target: Tensor) -> float:
    """Return micro-batches per second."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(NUM_TICKS):
        pipe.step(x, target)
    end.record()
    end.synchronize()
    return 1000 * NUM_TICKS / float(start.elapsed_time(end))


def main() -> None:
    """Measure all settings, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.rounds} rounds")
    results = []
    for row in ROWS:
        gc.collect()
        torch.cuda.empty_cache()
        results.append(compare(row, args.rounds))
        numbers = f"{results[-1]['predicted']:.4g} | {results[-1]['measured']:.4g}"
        print(f"| {row} | {numbers} | {100 * results[-1]['error']:+.1f} % |", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
