"""Activation memory of the models, per sample: stored, checkpointed, reversed; and by depth.

    python benchmarks/model-memory/run.py                  # counted on the meta device, any machine
    python benchmarks/model-memory/run.py --device cuda    # peaks measured by CUDA's allocator

Prints the tables of its README and of docs/models.md.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

import redivider as rd
from redivider.checks.memory import Live
from redivider.models.catalogue import resolve
from redivider.models.summary import Fused, summarise

METHODS = ("store", "checkpoint", "reverse", "reverse-checkpoint")
MIB = 2**20
# a model, and how to make it deeper by a number of layers or blocks
DEEPER: dict[str, Callable[[int], dict[str, Any]]] = {
    "resnet50": lambda n: {"depths": (3, 4, 6 + n, 3)},
    "vit_small": lambda n: {"depth": 12 + n},
    "swin_tiny": lambda n: {"depths": (2, 2, 6 + n, 2)},
    "mvit_base": lambda n: {"depths": (1, 2, 11 + n, 2)},
    "gpt_small": lambda n: {"depth": 12 + n},
    "roberta_base": lambda n: {"depth": 12 + n},
    "revnet18": lambda n: {"depths": (2, 2, 2 + n, 2)},
    "revnet50": lambda n: {"depths": (3, 4, 6 + n, 3)},
    "rev_vit_small": lambda n: {"depth": 12 + n},
    "rev_vit_base": lambda n: {"depth": 12 + n},
    "rev_vit_large": lambda n: {"depth": 24 + n},
    "rev_swin_tiny": lambda n: {"depths": (2, 2, 6 + n, 2)},
    "rev_swin_base": lambda n: {"depths": (2, 2, 18 + n, 2)},
    "rev_mvit_base": lambda n: {"depths": (1, 2, 11 + n, 2)},
    "rev_gpt_small": lambda n: {"depth": 12 + n},
    "rev_roberta_base": lambda n: {"depth": 12 + n},
}
PUBLISHED = {"small": (66.5, 8.8), "base": (129.7, 17.0), "large": (349.3, 22.6)}


def kept_by_depth() -> None:
    """Print memory between forward and backward, and what a layer or block adds."""
    print("| model | stored | checkpointed | reversed | least | each layer or block more: | | |")
    print("|---|---|---|---|---|---|---|---|")
    for name, deeper in DEEPER.items():
        now, then = (summarise(name, also=METHODS[1:], **deeper(n)).kept for n in (0, 8))
        slopes = {method: (then[method] - now[method]) / 8 / MIB for method in now}
        cells = [f"{now[method] / MIB:.2f}" if method in now else "-" for method in METHODS]
        cells += [f"{slopes[method]:.3f}" if method in now else "-" for method in METHODS[:3]]
        print(f"| `{name}` | {' | '.join(cells)} |")


def peaks(device: str) -> None:
    """Print the peak memory of a step that one more image takes."""
    print("| | stored | checkpointed | reversed | saved | published, stored | reversed | saved |")
    print("|---|---|---|---|---|---|---|---|")
    for size, (stored, rebuilt) in PUBLISHED.items():
        plain = slope(f"vit_{size}", "store", device)
        slopes = [slope(f"rev_vit_{size}", method, device) for method in METHODS[1:3]]
        cells = [f"{mib:.1f}" for mib in (plain, *slopes)]
        print(
            f"| ViT-{size[0].upper()} | {' | '.join(cells)} | {plain / slopes[-1]:.1f} "
            f"| {stored} | {rebuilt} | {stored / rebuilt:.1f} |"
        )


def slope(name: str, backward: str, device: str) -> float:
    """Return MiB of peak memory per sample from 8 to 64; weights and gradients cancel."""
    model = rd.create_model(name, device=device, backward=backward)
    options = resolve(name)[1]
    peak = peak_counted if device == "meta" else peak_measured
    few, many = (peak(model, options.example(batch).to(device)) for batch in (8, 64))
    return (many - few) / 56 / MIB


def peak_counted(model: rd.Chain, x: torch.Tensor) -> int:
    """Count live storages on the meta device, with attention as a fused kernel."""
    with Fused(), Live() as live:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    peak: int = live.peak
    return peak


def peak_measured(model: rd.Chain, x: torch.Tensor) -> int:
    """Measure with CUDA's allocator."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        peak = torch.cuda.max_memory_allocated()
        del gradients
    return peak


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="meta", choices=["meta", "cuda"])
    device = parser.parse_args().device
    if device == "cuda":
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    else:
        kept_by_depth()
        print()
    peaks(device)


if __name__ == "__main__":
    main()
