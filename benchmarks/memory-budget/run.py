"""Time of a training step against the memory it may take, on a GPU.

    python benchmarks/memory-budget/run.py --model rev_vit_large --batch 64 > results.json
    python benchmarks/memory-budget/run.py --model rev_gpt_small      # 8 texts of 1,024 bytes
    python benchmarks/memory-budget/run.py --solver                    # 400 units, on any machine

For every share of the memory of `store`: a plan, compiled and captured in bf16; and plans by hand,
which store as many couplings at the top as fit, and run all others by one strategy. Then the curve
of torch's activation_memory_budget on the same network, with its measured peaks.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import redivider as rd
from redivider.backward.stopwatch import timer
from redivider.budget.planner import measure_step
from redivider.budget.problem import Option, Peak, Problem, find_least, trace
from redivider.budget.solve import solve

SHARES = (0.25, 0.4, 0.6, 0.8)  # of store's memory
TORCH_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # values of torch's setting
BY_HAND = ("reverse", "checkpoint", "overlap", "save", "trim")  # for couplings that are not stored
NUM_STEPS = 20
NUM_UNITS = 400
PARTIAL = (
    (0.7, 0.12),
    (0.4, 0.35),
    (0.15, 0.7),
    (0.85, 0.05),
    (0.55, 0.22),
)  # shares of the graph kept, of the work done twice
MIB = 2**20


def make(name: str, batch: int, context: int) -> tuple[rd.Chain, torch.Tensor]:
    """Return a model and a batch on the GPU."""
    if "gpt" in name:
        model = rd.create_model(name, vocabulary=256, context=context, device="cuda")  # bytes
        return model, torch.randint(256, (batch, context), device="cuda")
    model = rd.create_model(name, num_classes=1000, device="cuda")
    return model, torch.randn(batch, 3, 224, 224, device="cuda")


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy with the first class."""
    scores = y.flatten(0, -2)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=y.device))


def time_step(
    model: Callable[..., Any], params: Sequence[Any], x: torch.Tensor
) -> dict[str, float]:
    """Return median milliseconds of captured steps in bf16, and the peak of eager ones."""

    def step(x: torch.Tensor) -> torch.Tensor:
        for param in params:
            param.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(x))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    for param in params:
        param.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(x)
    peak = torch.cuda.max_memory_allocated() - before
    captured = rd.capture(step, (x,))
    times = []
    for _ in range(NUM_STEPS):
        start, end = timer(), timer()
        start.record()
        captured(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {"ms": median(times), "peak_mib": peak / MIB}


def plan_by_hand(model: rd.Chain, x: torch.Tensor, budget: int, strategy: str) -> list[str] | None:
    """Return the plan that stores as many top couplings as fit, the others by a strategy."""
    couples = [isinstance(unit, rd.Coupling) for unit in model]
    fitting, few, many = None, 0, sum(couples)  # numbers of couplings that are not stored
    while few <= many:
        num, place, names = (few + many) // 2, 0, []
        for own in couples:
            names.append(strategy if own and place < num else "store")
            place += own
        with torch.autocast("cuda", torch.bfloat16):
            fits = measure_step(model, names, x, loss_of) <= budget
        fitting = names if fits else fitting
        few, many = (few, num - 1) if fits else (num + 1, many)
    return fitting


def compare(args: argparse.Namespace) -> None:
    """Print the times of plans, of plans by hand, and of torch's budget."""
    model, x = make(args.model, args.batch, args.context)
    model.compile(dynamic=False)
    params = list(model.parameters())
    with torch.autocast("cuda", torch.bfloat16):
        most = measure_step(model, "store", x, loss_of)
    model.backward = "store"
    rows: list[dict[str, Any]] = [{"how": "store", "budget_mib": most / MIB}]
    rows[0] |= time_step(model, params, x)
    print(json.dumps(rows[0]), flush=True)
    for share in args.shares:
        budget = int(share * most)
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            plan = rd.plan(model, x, memory=budget, loss=loss_of, capture=True)
        seconds = time.perf_counter() - start
        by_hand = {f"by hand, {name}": plan_by_hand(model, x, budget, name) for name in BY_HAND}
        fitting = {how: names for how, names in by_hand.items() if names is not None}
        for how, backward in {"plan": plan, **fitting}.items():
            model.backward = backward
            row = {"how": how, "share": share, "budget_mib": budget / MIB}
            row |= time_step(model, params, x)
            if how == "plan":
                row |= {"seconds": seconds, "measured_mib": plan.measured / MIB}
                row["choices"] = ",".join(plan)
            rows.append(row)
            print(json.dumps(row), flush=True)
    del model, params
    for share in args.torch_shares:
        fresh, x = make(args.model, args.batch, args.context)
        fresh.backward = "store"
        torch._functorch.config.activation_memory_budget = share
        compiled = torch.compile(fresh, dynamic=False)
        row = {"how": "torch", "share": share}
        row |= time_step(compiled, list(fresh.parameters()), x)
        print(json.dumps(row), flush=True)
        torch._dynamo.reset()


def time_solver() -> None:
    """Print seconds to solve 400 units of a few kinds, by three to eight options, on one core."""
    torch.set_num_threads(1)
    for num_options in (3, 6, 7, 8):
        time_options(num_options)


def time_options(num_options: int) -> None:
    """Print seconds to solve 400 units of a few kinds with so many options each."""
    rng = random.Random(0)
    stream = 25 * MIB
    for num_kinds in (1, 2, 8, 20, NUM_UNITS):
        kinds = [(rng.randrange(50, 150) * MIB, rng.uniform(1, 10)) for _ in range(num_kinds)]
        sizes: dict[Any, int] = dict.fromkeys(range(-2, NUM_UNITS), stream)
        units = []
        for i in range(NUM_UNITS):
            graph, cost = kinds[i % num_kinds]
            inside, top = Peak((), graph + 5 * stream), Peak((), graph + 3 * stream)
            options = [
                Option("store", 0.0, graph, (i - 1,), (Peak((i,), 2 * stream),)),
                Option("checkpoint", cost, 0, (i - 1,), (top,)),
                Option("reverse", 1.02 * cost, 0, (), (inside,), (i, i - 1), (top,)),
            ]
            for number, (share, work) in enumerate(PARTIAL[: num_options - 3]):
                held = int(share * graph / MIB) * MIB
                peak = Peak((i,), graph - held + 2 * stream)
                options.append(Option(f"partial {number}", work * cost, held, (i - 1,), (peak,)))
            units.append(options)
        problem = Problem(units, sizes)
        least = find_least(problem)
        most = max(peak for _, peak in trace(problem, [0] * NUM_UNITS))
        for share in (0.0, *SHARES, 1.0):
            start = time.process_time()
            solve(Problem(units, sizes), int(least + share * (most - least)))
            seconds = time.process_time() - start
            print(f"{num_options} options, {num_kinds} kinds, {share:.0%}: {seconds:.2f} s")


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="rev_vit_large")
    parser.add_argument("--batch", type=int, help="default: 8 texts, or 64 images")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--torch-shares", type=float, nargs="*", default=TORCH_SHARES)
    parser.add_argument("--solver", action="store_true")
    args = parser.parse_args()
    args.batch = args.batch or (8 if "gpt" in args.model else 64)
    if args.solver:
        time_solver()
    else:
        compare(args)


if __name__ == "__main__":
    main()
