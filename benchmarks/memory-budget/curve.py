"""FLOPs of a training step against the bytes it may take, on the CPU.

    python benchmarks/memory-budget/curve.py docs/pictures/budget.svg

Prints the table of docs/budget.md and draws its picture. Bytes are counted, so the result is the
same on any machine.
"""

import argparse
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import redivider as rd
from redivider.budget.measure import measure
from redivider.budget.planner import measure_step
from redivider.budget.problem import find_least
from redivider.budget.solve import solve
from redivider.checks.flops import counting_flops

plt.rcParams["svg.fonttype"] = "none"

NUM_BUDGETS = 30
SHOWN = (0.25, 0.4, 0.6, 0.8)  # of the memory of store
METHODS = ("store", "checkpoint", "reverse")


def make() -> tuple[rd.Chain, torch.Tensor]:
    """Return a Rev-ViT of 12 layers and a batch for it."""
    sizes: Any = {"depth": 12, "width": 96, "heads": 3, "patch_size": 8, "image_size": 64}
    torch.manual_seed(0)
    model = rd.create_model("rev_vit_small", num_classes=10, **sizes)
    return model, torch.randn(8, 3, 64, 64)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy with the first class."""
    return F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))


def run(model: rd.Chain, x: torch.Tensor, backward: Any) -> tuple[int, int]:
    """Return the peak in bytes and the FLOPs of a step."""
    peak = measure_step(model, backward, x, loss_of)
    model.backward = backward
    with counting_flops() as counter:
        loss_of(model(x)).backward()  # type: ignore[no-untyped-call]
    return peak, counter.get_total_flops()


def main() -> None:
    """Print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture")
    picture = parser.parse_args().picture
    model, x = make()
    methods = {name: run(model, x, name) for name in METHODS}
    most, work = methods["store"]
    problem = measure(model, x, {}, loss_of)
    least = find_least(problem)
    budgets = [least + step * (most - least) // (NUM_BUDGETS - 1) for step in range(NUM_BUDGETS)]
    shown = [int(share * most) for share in SHOWN]
    points = []
    print("| budget, of store's peak | peak, measured | FLOPs, of store's | stored, saved, of 24 |")
    print("|---|---|---|---|")
    for budget in sorted([*budgets, *shown]):
        choices = solve(problem, budget)
        assert choices is not None
        pairs = zip(problem.units[:-1], choices[:-1], strict=True)
        plan = [own[choice].choice for own, choice in pairs]
        peak, flops = run(model, x, plan)
        assert peak <= budget
        points.append((peak / 2**20, flops / work))
        if budget in (least, *shown, most):
            stored = f"{plan[1:-1].count('store')} and {plan.count('save')}"
            print(
                f"| {budget / most:.0%} | {peak / 2**20:.2f} MiB | {flops / work:.3f} | {stored} |"
            )
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(*zip(*points, strict=True), "o-", ms=3, label="rd.plan")
    for name, (peak, flops) in methods.items():
        print(f"| `{name}` | {peak / 2**20:.2f} MiB | {flops / work:.3f} | |")
        axis.plot(peak / 2**20, flops / work, "s", label=f'backward="{name}"')
    axis.set(xlabel="peak of a step, MiB (counted)", ylabel="FLOPs of a step, store = 1", xlim=0)
    axis.legend()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
