"""Cost of each pipeline method on the CPU: memory by stage, work, copies of the weights.

Every method trains the same reversible network, cut into the same stages, until the pipeline is
full; then the bytes that the stages hold between two ticks are counted by storage: activations
(kept inputs and graphs) and copies of the weights. Work is torch's count of FLOPs in one tick.

    python benchmarks/pipeline-cpu/run.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import redivider as rd
from redivider.pipeline.diagnostics.memory import holdings
from redivider.pipeline.methods import METHODS


def build(options: argparse.Namespace, method: str) -> rd.Pipeline:
    """Return a stem, couplings with a junction in the middle and a head, about one unit a stage."""
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
        stages = holdings(pipe)
        activations = sum(stage.activations for stage in stages) / 2**20
        copies = sum(stage.weights for stage in stages) / 2**20
        work = counter.get_total_flops() / 1e6
        print(f"| {method} | {activations:.1f} | {copies:.1f} | {work:.0f} |")


if __name__ == "__main__":
    main()
