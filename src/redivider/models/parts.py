"""Modules that several families share.

Every module with weights has `reset_parameters`, so that models can be built on the meta device and
get their weights later.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redivider.models.attention import attend
from redivider.models.options import Layers

Units = dict[str, nn.Module]
Norm = partial(nn.LayerNorm, eps=1e-6)
"""Layer norm with the epsilon of vision transformers."""


class Residual(nn.Module):
    """x -> x + f(x): the counterpart of a coupling in a network that is not reversible."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.f(x)
        return y


class Linear(nn.Linear):
    """Linear map whose bias is initialised to 0.

    Its weights are drawn from a normal distribution with standard deviation `std`, or by default
    with Glorot's rule, which suits all widths.
    """

    def __init__(
        self, width: int, out: int, *, std: float | None = None, bias: bool = True
    ) -> None:
        self.std = std
        super().__init__(width, out, bias=bias)

    def reset_parameters(self) -> None:
        if self.std is None:
            nn.init.xavier_uniform_(self.weight)
        else:
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Positions(nn.Module):
    """Learned positions, added to the tokens; shorter sequences use the first ones."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small normal weights."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        verify_tokens(x, len(self.weight))
        return x + self.weight[: x.shape[1]]


def verify_tokens(x: Tensor, most: int) -> None:
    """Raise unless `x` has shape (batch, tokens, width) with at most `most` tokens."""
    if x.dim() != 3:
        raise ValueError(f"tokens must have shape (batch, tokens), got {x.dim() - 1} dimensions")
    if x.shape[1] > most:
        raise ValueError(f"{x.shape[1]} tokens exceed the limit of {most}")


class ClassToken(nn.Module):
    """Learned token, put before the others."""

    def __init__(self, width: int, *, std: float = 1e-6) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small normal weights."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.weight.expand(x.shape[0], 1, -1).to(x), x), dim=1)


class First(nn.Module):
    """Pooling that keeps only the first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Attention(nn.Module):
    """Self-attention over tokens of shape (batch, tokens, width).

    Args:
        width: Width of a token.
        heads: Number of heads; it divides the width.
        causal: Whether a token attends only to itself and to earlier tokens.
        dropout: Dropout rate of the attention weights.
        std: Standard deviations of the initial weights of `qkv` and `out`; None for Glorot's rule.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        std: tuple[float, float] | tuple[None, None] = (None, None),
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = Linear(width, 3 * width, std=std[0])
        self.out = Linear(width, width, std=std[1])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, dropout=dropout, causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}, dropout={self.dropout}"


class SwiGLU(nn.Module):
    """MLP whose hidden units are gated (Shazeer 2020): shrink(silu(gate(x)) * grow(x)).

    Args:
        width: Width of a token.
        hidden: Number of hidden units.
        std: Standard deviations of the initial weights of `gate` and `grow`, and of `shrink`.
    """

    def __init__(self, width: int, hidden: int, *, std: tuple[float, float]) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, std=std[0], bias=False)
        self.grow = Linear(width, hidden, std=std[0], bias=False)
        self.shrink = Linear(hidden, width, std=std[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shrink(F.silu(self.gate(x)) * self.grow(x))
        return y


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016).

    In training it zeroes the residual of random samples and rescales the others, so that the
    expectation stays the same.
    """

    keep: Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        self._probability = probability
        self._drops = probability > 0
        # torch.compile would specialise on a Python float, and compile a graph per layer. With a
        # buffer all layers share one graph.
        self.register_buffer("keep", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the probability of keeping a residual."""
        self.keep.fill_(1 - self._probability)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self._drops:
            return x
        keep = self.keep.float()
        uniform = torch.rand(len(x), *(1,) * (x.dim() - 1), device=x.device)
        return x * ((uniform < keep) / keep).to(x.dtype)


class Mean(nn.Module):
    """Mean over some dimensions; means of two streams are concatenated."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(x, Tensor):
            return x.mean(self.dims)
        return torch.cat([stream.mean(self.dims) for stream in x], 1)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.dims))


def conv_norm(
    channels: int, out: int, kernel: int, *, stride: int = 1, relu: bool = True, bias: bool
) -> nn.Sequential:
    """Build a convolution, a batch norm and optionally a ReLU."""
    conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=bias)
    parts: dict[str, nn.Module] = {"conv": conv, "norm": nn.BatchNorm2d(out)}
    return named(**parts, relu=nn.ReLU(inplace=True)) if relu else named(**parts)


def mlp(
    width: int,
    hidden: int,
    activation: Callable[[], nn.Module] = nn.GELU,
    *,
    dropout: float = 0.0,
    std: tuple[float, float] | tuple[None, None] = (None, None),
) -> nn.Sequential:
    """Build an MLP: two linear maps with an activation between them."""
    return named(
        grow=Linear(width, hidden, std=std[0]),
        activation=activation(),
        dropout=nn.Dropout(dropout),
        shrink=Linear(hidden, width, std=std[1]),
    )


def residual(
    norm: nn.Module, body: nn.Module, *, dropout: float = 0.0, drop_path: float = 0.0
) -> nn.Sequential:
    """Build a residual function: norm, body, dropout, drop-path."""
    return named(norm=norm, body=body, dropout=nn.Dropout(dropout), drop_path=DropPath(drop_path))


def named(**modules: nn.Module) -> nn.Sequential:
    """Build a Sequential with named parts."""
    return nn.Sequential(OrderedDict(modules))


def transformer_layers(
    options: Layers,
    norm: Callable[[int], nn.Module],
    activation: Callable[[], nn.Module] = nn.GELU,
    *,
    causal: bool = False,
    mlp_dropout: float = 0.0,
    std: tuple[float, float] | tuple[None, None] = (None, None),
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the residual functions, attention and MLP in turn, with the names of their units."""
    width = options.width
    for layer in range(options.depth):
        drops = options.drops_of(layer)
        attention = Attention(
            width, options.heads, causal=causal, dropout=options.attention_dropout, std=std
        )
        yield f"layer{layer}_attention", residual(norm(width), attention, **drops)
        body = mlp(width, options.middle, activation, dropout=mlp_dropout, std=std)
        yield f"layer{layer}_mlp", residual(norm(width), body, **drops)
