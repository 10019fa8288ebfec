"""Drift of rebuilt streams, and what it does to gradients, by depth and by arithmetic.

Attention and MLP couplings in turn, as in run.py. Drift is the relative error of the chain's input
as rebuilt from its output; the gradient's is the worst over all parameters, against plain backprop
through the same units in the same arithmetic. A gain multiplies the weights of every matrix, as
training does: a larger residual hides more of the stream it is added to.

    python benchmarks/chain-cpu/drift.py
"""

import argparse

import torch
from run import Attention, mlp
from torch import nn

import redivider as rd

# name: (dtype of the streams, whether f runs in bf16 under autocast, arithmetic)
SETTINGS = {
    "float64": (torch.float64, False, "float"),
    "float32": (torch.float32, False, "float"),
    "float32, f in bf16": (torch.float32, True, "float"),
    "bf16": (torch.bfloat16, False, "float"),
    "fixed, f in bf16": (torch.float32, True, "fixed"),
}


def measure(name: str, depth: int, gain: float, options: argparse.Namespace) -> tuple[float, float]:
    """Return the relative errors of the rebuilt input and of the worst parameter's gradient."""
    dtype, autocast, arithmetic = SETTINGS[name]
    torch.manual_seed(0)
    width = options.width
    makers = (lambda: Attention(width, width // 32), lambda: mlp(width))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(depth)]
    chain = rd.Chain([rd.Duplicate(), *couplings, rd.Fuse("mean")], arithmetic=arithmetic)
    with torch.no_grad():
        for module in chain.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(gain)
    chain = chain.to(dtype)
    x = torch.randn(options.batch, options.tokens, width, dtype=torch.float64).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        drift = rd.check_reversible(chain, x, tolerance=torch.inf).worst
        gradient = rd.check_gradients(chain, x, tolerance=torch.inf).worst
    return drift, gradient


def main() -> None:
    """Measure and print a table for each gain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 48, 128])
    parser.add_argument("--gains", type=float, nargs="+", default=[1.0, 3.0])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {vars(options)}")
    for gain in options.gains:
        print(f"\nweights x {gain:g}: drift / error of the worst gradient\n")
        print("| couplings | " + " | ".join(SETTINGS) + " |")
        print("|---" * (len(SETTINGS) + 1) + "|")
        for depth in options.depths:
            cells = [measure(name, depth, gain, options) for name in SETTINGS]
            print(f"| {depth} | " + " | ".join(f"{d:.0e} / {g:.0e}" for d, g in cells) + " |")


if __name__ == "__main__":
    main()
