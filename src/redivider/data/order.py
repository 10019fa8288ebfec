"""Order and chance: pure functions of (seed, epoch, position).

Numbers are hashed from their place (the finaliser of SplitMix64: Steele, Lea and Flood 2014) and
not drawn one after another. So a run that goes on at any step sees the samples that it would have
seen, and every device and every version of torch gives the same ones.
"""

from zlib import crc32

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def permutation(num: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """The numbers below `num` in the order of this epoch."""
    positions = torch.arange(num, device=device)
    return draw(positions, seed=seed, epoch=epoch, purpose="order").argsort(stable=True)


def draw(positions: Tensor, *, seed: int, epoch: int, purpose: str) -> Tensor:
    """A random whole number below 2^63 for each position; other purposes get other numbers."""
    key = 0
    for part in (seed, epoch, crc32(purpose.encode())):
        key = int(_mix(torch.tensor(_signed(key + part * GOLDEN + GOLDEN), device="cpu")))
    return _mix(positions * _signed(GOLDEN) + key) & 0x7FFFFFFFFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The low 64 bits, as torch's int64 has them."""
    return (value + 2**63) % 2**64 - 2**63
