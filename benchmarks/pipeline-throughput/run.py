"""Training steps of a pipeline on one GPU, beside backprop: whole steps, with the optimizer.

    python benchmarks/pipeline-throughput/run.py --out results.json
    python benchmarks/pipeline-throughput/run.py --only revnet18 --batches 16 64
    python benchmarks/pipeline-throughput/run.py --peer-path ../PETRA  # the official code

bf16 under autocast with weights in float32, SGD with Nesterov momentum, images of 32 pixels. All
methods of one setting take turns, so that ratios are of one time. Data is on the GPU already.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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

# name: model, options, stages
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "revnet18": ("revnet18", {}, "auto"),
    "revnet50": ("revnet50", {}, "auto"),
    "vit12": ("rev_vit_small", {"depth": 12, "patch_size": 4}, 26),
    "vit48": ("rev_vit_small", {"depth": 48, "patch_size": 4}, 50),
}
BATCHES = (4, 8, 16, 64, 128)
METHODS = (
    *("backprop", "backprop, compiled whole", "one branch", "branches", "half ticks", "eager"),
    "muon",
)
OPTIONS: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "fused": True}
NUM_TO_FILL = 40  # ticks until the official pipeline is full, at 18 stages
Step = Callable[[Tensor, Tensor], Any]


class OneBranch(CudaGraphs):
    """CUDA graphs without branches."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        super().__init__(device, 0)

    def lane(self, index: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, lane: int, other: int) -> None:
        pass


def make_model(name: str, backward: str = "store") -> rd.Chain:
    """Return a network for images of 32 pixels; with convolutions, in channels_last."""
    model, options, _ = MODELS[name]
    chain = rd.create_model(
        model, num_classes=10, image_size=32, device="cuda", backward=backward, **options
    )
    chain.check_every = 0
    if "net" in model:
        chain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return chain


def make_data(name: str, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return a few different batches."""
    batches = []
    for _ in range(4):
        x = torch.randn(batch, 3, 32, 32, device="cuda")
        x = x.to(memory_format=torch.channels_last) if "net" in name else x
        batches.append((x, torch.randint(10, (batch,), device="cuda")))
    return batches


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in float32."""
    return F.cross_entropy(output.float(), target)


def backprop(name: str, batch: int, compiled: bool, whole: bool = False) -> Step:
    """Return a captured step of plain backprop."""
    chain = make_model(name)
    optimizer = torch.optim.SGD(chain.parameters(), lr=torch.tensor(0.01).cuda(), **OPTIONS)
    run: Any = chain
    if compiled and whole:
        run = torch.compile(chain, dynamic=False)
    elif compiled:
        chain.compile(dynamic=False)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(run(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return rd.capture(step, make_data(name, batch)[0])


def sgd(stage: Any) -> torch.optim.Optimizer:
    """Return an optimizer at whose rate nothing diverges: the data is noise."""
    return torch.optim.SGD(stage.parameters(), lr=1e-6, **OPTIONS)


def muon(stage: Any) -> torch.optim.Optimizer:
    """Return Muon at such a rate."""
    return rd.Muon(stage, 1e-6, momentum=0.6, scale="spectral", rest="sgd", weight_decay=0.01)


def pipeline(
    name: str,
    batch: int,
    compiled: bool,
    *,
    branches: bool = True,
    capture: bool = True,
    latency: float = 1,
    accumulate: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Step:
    """Return a tick of a full pipeline, captured by default."""
    pipe = rd.Pipeline(
        make_model(name),
        stages=MODELS[name][2],
        loss=loss_of,
        optimizer=optimizer,
        accumulate=accumulate,
        capture=capture,
        latency=latency,
    )
    if compiled:
        pipe.compile(dynamic=False)
    if capture and not branches:
        pipe.execution = CapturedRunner(pipe, partial(OneBranch, torch.device("cuda")))

    def step(x: Tensor, target: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return pipe.step(x, target)

    data = make_data(name, batch)
    for tick in range((4 if capture else 2) * len(pipe.stages) + 20):
        step(*data[tick % len(data)])
    if capture and not pipe.execution.is_active:
        raise SystemExit(f"ticks of {name} at {batch} were not captured; the log says why")
    return step


def make_steps(name: str, batch: int, args: argparse.Namespace) -> dict[str, Step]:
    """Return the methods of one setting."""
    petra = partial(pipeline, name, batch, accumulate=args.accumulate)
    makers: dict[str, Callable[[bool], Step]] = {
        "backprop": partial(backprop, name, batch),
        "backprop, compiled whole": partial(backprop, name, batch, whole=True),
        "one branch": partial(petra, branches=False),
        "branches": petra,
        "half ticks": partial(petra, latency=0.5),
        "eager": partial(petra, capture=False),
        "muon": partial(petra, optimizer=muon),
    }
    steps = {method: makers[method](not args.uncompiled) for method in args.methods}
    if args.peer_path and "revnet" in name:
        from peers import petra_tick

        tick = petra_tick(args.peer_path, MODELS[name][0], batch, torch.device("cuda"))
        data = make_data(name, batch)
        for index in range(NUM_TO_FILL):
            tick(*data[index % len(data)])
        steps["official PETRA"] = tick
    return steps


def take_turns(
    steps: dict[str, Step], data: list[tuple[Tensor, Tensor]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Time steps in rounds; return milliseconds of each, and those of the host."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            num = 4 if name == "eager" or "official" in name else 40
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for index in range(2):
                step(*data[index])
            torch.cuda.synchronize()
            start.record()
            began = time.perf_counter()
            for index in range(num):
                step(*data[index % len(data)])
            host = 1000 * (time.perf_counter() - began)
            end.record()
            end.synchronize()
            times[name].append((start.elapsed_time(end) / num, host / num))
    return times


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per update")
    parser.add_argument("--uncompiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peer-path", help="a clone of the official PETRA code")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.rounds} rounds")
    rows: list[dict[str, Any]] = []
    for name in args.only:
        for batch in args.batches:
            gc.collect()
            torch.cuda.empty_cache()
            steps = make_steps(name, batch, args)
            times = take_turns(steps, make_data(name, batch), args.rounds)
            for method, pairs in times.items():
                ordered = sorted(took for took, _ in pairs)
                row = {
                    "model": name,
                    "batch": batch,
                    "method": method,
                    "ms": median(ordered),
                    "quartiles": [ordered[len(pairs) // 4], ordered[3 * len(pairs) // 4]],
                    "host_ms": median(host for _, host in pairs),
                }
                rows.append(row)
                times_of = f"{row['ms']:.3f} | {row['host_ms']:.3f}"
                print(f"| {name} | {batch} | {method} | {times_of} |", flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
            del steps
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
