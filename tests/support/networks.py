"""Small residual functions and chains for the tests, each with a trait of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redivider as rd


class MLP(nn.Sequential):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )


class Marked(MLP):
    """Keeps a product and random numbers for the backward, where the strategy says so."""

    def forward(self, x):
        norm, up, activation, dropout, down = self
        hidden = rd.save(up(norm(x)))
        scale = rd.save(torch.rand_like(hidden)) if self.training else 1.0
        return down(dropout(activation(hidden) * scale))


class ConvNorm(nn.Sequential):
    """As in PETRA: convolution with bias, batch norm, ReLU; the bias has a zero gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Reading(nn.Module):
    """Asks for a number on the host, which a CUDA graph cannot hold."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) * (1.0 if x.sum().item() > 0 else 0.5)


class Buffered(nn.Module):
    """Reads one buffer and changes another one at every run; its output depends on both."""

    scale: Tensor
    phase: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("phase", torch.zeros(()))

    def forward(self, x):
        self.phase.add_(0.3)
        return torch.tanh(self.linear(x) * self.scale + self.phase)


class Twice(nn.Module):
    """Reads its input twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.value(x)


def vector_chain(make=MLP, depth: int = 3, width: int = 8, **options) -> rd.Chain:
    """Return stem, couplings of `make(width)` and head, for inputs of 6 features."""
    return rd.Chain(
        [
            nn.Linear(6, width),
            rd.Duplicate(),
            *(rd.Coupling(make(width)) for _ in range(depth)),
            rd.Fuse("concat"),
            nn.Linear(2 * width, 3),
        ],
        **options,
    )


def token_chain(depth: int = 6, width: int = 64, dropout: float = 0.0, **options) -> rd.Chain:
    """Return couplings of attention and MLP in turn, on the GPU, for tokens of 6 features."""
    makers = (lambda: Attention(width, 4, dropout), lambda: MLP(width, dropout))
    couplings = [rd.Coupling(makers[i % 2]()) for i in range(depth)]
    units = [nn.Linear(6, width), rd.Duplicate(), *couplings, rd.Fuse(), nn.Linear(2 * width, 3)]
    return rd.Chain(units, **options).cuda()
