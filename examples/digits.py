"""Train a reversible network on scikit-learn's digits, by plain backprop and by reversing it.

Both runs start from the same weights and see the same batches, so they end at the same accuracy;
what differs is the memory that the activations take.

    python examples/digits.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import redivider as rd


def residual(width: int) -> nn.Module:
    """Build a residual function: it keeps its input's shape and has no skip of its own."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
    )


def build(backward: str, *, depth: int, width: int) -> rd.Chain:
    """Make the network; the same weights whatever the backward."""
    torch.manual_seed(0)
    couplings = [rd.Coupling(residual(width)) for _ in range(depth)]
    stem, head = nn.Linear(64, width), nn.Linear(2 * width, 10)
    return rd.Chain([stem, rd.Duplicate(), *couplings, rd.Fuse("concat"), head], backward=backward)


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read the digits: training images and labels, then those of the test."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def train(model: rd.Chain, images: Tensor, labels: Tensor, *, epochs: int, batch: int) -> None:
    """Train by AdamW, under a progress bar."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = epochs * (len(labels) // batch)
    bar = tqdm(total=steps, desc=model.backward, unit="step", mininterval=0.5)
    for _ in range(epochs):
        for index in torch.randperm(len(labels))[: len(labels) // batch * batch].split(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[index]), labels[index])
            loss.backward()
            optimizer.step()
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    bar.close()


def main() -> None:
    """Train both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=32, help="number of couplings")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    images, labels, test_images, test_labels = load()
    rows = []
    for backward in ("store", "reverse"):
        model = build(backward, depth=options.depth, width=options.width)
        memory = rd.measure_memory(model, images[: options.batch])
        train(model, images, labels, epochs=options.epochs, batch=options.batch)
        with torch.no_grad():
            accuracy = (model.eval()(test_images).argmax(1) == test_labels).float().mean().item()
        rows.append((backward, accuracy, memory.held))
    print(f"\n{options.depth} couplings of width {options.width}, {options.epochs} epochs")
    print(f"{'backward':>10}  {'test accuracy':>13}  {'activations kept':>16}")
    for backward, accuracy, held in rows:
        print(f"{backward:>10}  {accuracy:>13.1%}  {held / 1024:>12.0f} KiB")
    print(f"Reversing kept {rows[0][2] / rows[1][2]:.1f} times less.")


if __name__ == "__main__":
    main()
