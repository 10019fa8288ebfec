"""Junctions that begin and end the streams of a reversible network.

A junction is any module that is not a coupling. These three make a pair of streams out of one
tensor, and one tensor out of a pair.
"""

import torch
from torch import Tensor, nn

from redivider.coupling import Streams, verify_streams
from redivider.errors import UnitError, not_one_of

FUSIONS = ("concat", "add", "mean", "first", "second")


class Duplicate(nn.Module):
    """Junction x -> (x, x): both streams begin alike, as in Rev-ViT."""

    def forward(self, x: Tensor) -> Streams:
        """Return x twice, without a copy: no unit changes a stream in place."""
        return x, x


class Split(nn.Module):
    """Junction x -> its two halves along `dim`: channels (1) in RevNet, features (-1) elsewhere."""

    def __init__(self, *, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Streams:
        """Split x in the middle."""
        if x.shape[self.dim] % 2:
            raise UnitError(
                f"dimension {self.dim} of {tuple(x.shape)} is odd: it has no two equal halves"
            )
        a, b = x.chunk(2, dim=self.dim)
        return a, b

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Fuse(nn.Module):
    """Junction (a, b) -> one tensor: "concat", "add", "mean", or one of the streams.

    Args:
        how: "concat", "add", "mean", "first" or "second".
        dim: The dimension of "concat".
    """

    def __init__(self, how: str = "concat", *, dim: int = -1) -> None:
        super().__init__()
        if how not in FUSIONS:
            raise ValueError(not_one_of("how", how, FUSIONS))
        self.how = how
        self.dim = dim

    def forward(self, streams: Streams) -> Tensor:
        """Join the streams."""
        a, b = verify_streams(streams)
        match self.how:
            case "concat":
                return torch.cat((a, b), dim=self.dim)
            case "add":
                return a + b
            case "mean":
                return (a + b) / 2
            case "first":
                return a
            case _:
                return b

    def extra_repr(self) -> str:
        return f"{self.how!r}, dim={self.dim}" if self.how == "concat" else repr(self.how)
