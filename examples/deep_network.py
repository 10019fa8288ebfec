"""A deep network in flat memory: memory by depth, and a training step in each way.

python examples/deep_network.py
"""

import torch
from torch import nn

import redivider as rd

WIDTH = 128


def make(depth: int) -> rd.Chain:
    """Return a network of `depth` residual branches."""
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        for _ in range(depth)
    ]
    stem, head = nn.Linear(32, WIDTH), nn.Linear(2 * WIDTH, 10)
    return rd.Chain([stem, rd.Duplicate(), *map(rd.Coupling, blocks), rd.Fuse("concat"), head])


def main() -> None:
    """Print what is held by depth, then train."""
    torch.manual_seed(0)
    x, targets = torch.randn(64, 32), torch.randint(10, (64,))
    print("KiB held by  store  checkpoint  reverse")
    for depth in (8, 32):
        memory = rd.compare_memory(make(depth), x).by_backward
        cells = [f"{memory[name].held / 1024:>9,.0f}" for name in memory]
        print(f"depth {depth:>4} ", *cells)
    model = make(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        loss = nn.functional.cross_entropy(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    print("worst rebuilt input:", f"{rd.check_reversible(model, x).worst:.1e}")


if __name__ == "__main__":
    main()
