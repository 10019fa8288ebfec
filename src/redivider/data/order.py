"""Permutations and random numbers as pure functions of (seed, epoch, position).

A number is the hash of its position (the finaliser of SplitMix64: Steele, Lea and Flood 2014), not
the next one of a sequence. So a run that resumes at any step sees the samples that it would have
seen, and all devices and versions of torch give the same ones.
"""

from zlib import crc32

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def permutation(num: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the numbers below `num` in the random order of an epoch."""
    positions = torch.arange(num, device=device)
    return draw(positions, seed=seed, epoch=epoch, purpose="order").argsort(stable=True)


def draw(positions: Tensor, *, seed: int, epoch: int, purpose: str) -> Tensor:
    """Return a random integer in [0, 2^63) per position; every purpose has its own numbers."""
    key = 0
    for part in (seed, epoch, crc32(purpose.encode())):
        key = int(_mix(torch.tensor(_to_int64(key + part * GOLDEN + GOLDEN), device="cpu")))
    return _mix(positions * _to_int64(GOLDEN) + key) & 0x7FFFFFFFFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_int64(value: int) -> int:
    """Return the low 64 bits as a signed integer, for torch's int64."""
    return (value + 2**63) % 2**64 - 2**63
