"""What each method of a pipeline costs on the CPU: memory by stage, work, copies of the weights.

Every method trains the same reversible network, cut into the same stages, until the pipeline is
full; then the bytes that the stages hold between two ticks are counted by storage: activations
(kept inputs and graphs) and copies of the weights. Work is torch's count of FLOPs in one tick.

    python benchmarks/pipeline-cpu/run.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd
from redivider.pipeline.memory import METHODS
from redivider.pipeline.stage import Stage


def build(options: argparse.Namespace, method: str) -> rd.Pipeline:
    """A stem, couplings with a junction half way, a head; about one unit a stage."""
    torch.manual_seed(0)
    width = options.width

    def f() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    half = options.couplings // 2
    units = [nn.Linear(64, 2 * width), rd.Split(), *(rd.Coupling(f()) for _ in range(half))]
    units += [
        Mix(width),
        *(rd.Coupling(f()) for _ in range(half)),
        rd.Fuse(),
        nn.Linear(2 * width, 10),
    ]
    cut = [2, *[1] * half, 1, *[1] * half, 2]
    return rd.Pipeline(
        units,
        stages=cut,
        loss=F.cross_entropy,
        optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=1e-3),
        method=method,
        accumulate=options.accumulate,
    )


class Mix(nn.Module):
    """A junction from a pair to a pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Project both streams."""
        return self.a(streams[0]), self.b(streams[1])


def size(tree: object, known: set[int]) -> int:
    """Bytes of all storages in a tree that are not known yet."""
    total = 0
    for each in tree_leaves(tree):
        if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
            known.add(each.untyped_storage().data_ptr())
            total += each.untyped_storage().nbytes()
    return total


def graph_tensors(output: object) -> list[Tensor]:
    """What autograd has saved in the graph of an output."""
    saved, seen = [], set()
    queue = [each.grad_fn for each in tree_leaves(output)]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                saved += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        queue += [after for after, _ in node.next_functions]
    return saved


def held(stage: Stage) -> tuple[int, int]:
    """Bytes of activations and of copies of the weights that a stage holds."""
    known: set[int] = set()
    size([*stage.module.parameters()], known)
    copies = size([u.weights.stash.copies for u in stage.units if u.weights.stash], known)
    kept = [each for unit in stage.units for each in unit.kept.values()]
    graphs = [t for each in kept if each.run for t in graph_tensors(each.run.output)]
    return size([[each.value for each in kept], graphs], known), copies


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--couplings", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {vars(options)}\n")
    print("| method | activations MiB | copies of weights MiB | MFLOP a tick |")
    print("|---|---|---|---|")
    for method in METHODS:
        pipe = build(options, method)
        for _ in range(2 * len(pipe.cut)):
            pipe.step(torch.randn(options.batch, 64), torch.randint(10, (options.batch,)))
        with FlopCounterMode(display=False) as counter:
            pipe.step(torch.randn(options.batch, 64), torch.randint(10, (options.batch,)))
        both = [held(stage) for stage in pipe.stages]
        activations, copies = (sum(column) / 2**20 for column in zip(*both, strict=True))
        work = counter.get_total_flops() / 1e6
        print(f"| {method} | {activations:.1f} | {copies:.1f} | {work:.0f} |")


if __name__ == "__main__":
    main()
