"""Rotary positions (RoPE, Su et al. 2021), with the scaling of Llama 3 for long contexts.

Position p rotates the coordinates i and i + width / 2 of a query or key by the angle p * f_i, with
f_i = theta ** (-2 i / width). The product of a query and a key then depends on their distance.
Llama 3 was trained on 8,192 tokens. For longer contexts it divides the frequencies of long
wavelengths by a factor, keeps those of short ones, and blends those between.
"""

from math import pi

import torch
from torch import Tensor, nn

TRAINED_CONTEXT = 8192
KEPT, DIVIDED = 4.0, 1.0  # turns within the trained context: at least, at most


class Rope(nn.Module):
    """Rotation of queries and keys of shape (batch, heads, tokens, width) by their positions.

    Args:
        width: Width of a head, an even number.
        theta: Base of the frequencies.
        factor: Divisor of the frequencies of long wavelengths; 1 for RoPE without scaling.
    """

    def __init__(self, width: int, *, theta: float, factor: float = 1.0) -> None:
        super().__init__()
        self.width, self.theta, self.factor = width, theta, factor

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # The angles are computed in every forward: a buffer would follow the model to bfloat16,
        # in which late positions are equal.
        positions = torch.arange(q.shape[-2], device=q.device, dtype=torch.float32)
        angles = positions[:, None] * frequencies(self.width, self.theta, self.factor, q.device)
        cos, sin = angles.cos(), angles.sin()
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def extra_repr(self) -> str:
        return f"width={self.width}, theta={self.theta}, factor={self.factor}"


def frequencies(
    width: int, theta: float, factor: float, device: torch.device | None = None
) -> Tensor:
    """Return the frequencies of the pairs of coordinates, in float32 as they were trained."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    plain = 1.0 / theta**exponents
    if factor == 1:
        return plain
    turns = TRAINED_CONTEXT / (2 * pi / plain)
    kept = ((turns - DIVIDED) / (KEPT - DIVIDED)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of coordinates of `x`, in float32 or more."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
